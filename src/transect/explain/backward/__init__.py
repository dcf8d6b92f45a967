"""Explain a backward pass.

* ``graph``: the nodes of the graph behind a loss: saved tensors, their bytes, times.
* ``text``: the same as lines of text.
* ``losses``: sources of losses: a model's, or a Python file's.
"""
