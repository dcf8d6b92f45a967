"""Causal attention over packed documents, and prompts that a step holds whole.

* ``attention.py``        the operator of the model
* ``flash_attention.py`` (``flash_attention.cu``)  the operator; ``triton.py``: its portable kernel
* ``peers.py``            what it is raced against
* ``backward.py``         its gradient
* ``hopper.py``, ``backward_hopper.py``: both for Hopper; ``hopper_tiles.py``: parts of ``hopper.py`` that paged prefill
  shares
* ``tiling.py``           what they share
"""
