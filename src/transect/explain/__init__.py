"""Why a run took as long as it did, and what happens inside.

* ``backward.py``: what ``loss.backward()`` does, node by node
* ``losses.py``: makes a loss to explain, from a model or a Python file
* ``backward_text.py``: prints a backward pass as lines of text
"""
