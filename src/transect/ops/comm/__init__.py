"""Copies between memories, and sums between GPUs.

* ``ring_copy.py``   a step's inputs from the host and its results back, as kernels of the step's CUDA graph
* ``all_reduce.py``  sums over ranks, with the residual add and norm that follow (``all_reduce.cu``);
  ``peer_memory.py``: the memory that they go through
* ``add_twice.py``   a sum that is written to two places
* ``copy_engine.py``  copies between GPUs, and streams that wait for each other, without multiprocessors
"""
