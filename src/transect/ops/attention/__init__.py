"""Causal attention.

* ``packed/``  over packed documents: training, and prompts that a step holds whole
* ``paged/``   through the block table of a paged KV cache: serving
"""
