"""Copies between memories.

* ``ring_copy.py``  a step's inputs from the host and its results back, as kernels of the step's CUDA graph
"""
