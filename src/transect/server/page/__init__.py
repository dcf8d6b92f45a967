"""The page at ``/``: chat, the live view of the engine, and reports.

* ``routes``: the page's files, with a Content-Security-Policy. ``board``: the page over reports, without a model.
  ``flows``: states of flows as reports.
* ``files/``: built from ``page/`` at the repository's root, whose ``build.json`` has a digest of its sources.
"""
