"""Data of a flow: rows that are read, cleaned and split.

* ``reading.py``: files to rows with their hashes. ``cleaning.py``: duplicates, overlap with benchmarks, splits without
  leaks. ``near.py``: near-duplicates by MinHash.
"""
