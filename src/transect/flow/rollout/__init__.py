"""Releases of versions on a server, and the rule by which they are judged.

* ``remote.py``: a server's adapters, releases and counters, by HTTP. ``tally.py``: counts of two versions since the
  watch began. ``rule.py``: bars for the candidate beside the current version, at planned looks. ``drifted.py``: drift
  as a condition of promotion.
"""
