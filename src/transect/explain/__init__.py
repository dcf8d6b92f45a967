"""Why a run took as long as it did, and what happens inside.

* ``backward.py``: what ``loss.backward()`` does, node by node. ``losses.py``: of a model or a Python file.
  ``backward_text.py``: as lines of text.
"""
