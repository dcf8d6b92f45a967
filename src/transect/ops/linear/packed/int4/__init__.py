"""Products by weights of 4 bits in groups, each group with a scale and a zero.

* ``int4_matmul.py``  the operator, and which kernel runs; ``triton.py``: the portable kernels
* ``int4_rows.py`` (``int4_matmul.cu``)           up to 16 rows on Hopper
* ``int4_portable.py`` (``int4_portable.cu``)     up to 128 rows on other GPUs since Ampere
* ``int4_hopper.py`` (``int4_matmul_hopper.cu``)  heads on Hopper
* ``int4_tiles.py`` (``int4_tiles.cu``)           17 to 512 rows on Hopper
* ``int4_chain.py`` (``int4_chain.cu``)           one row: the four products between two attentions in one launch
* ``int4_invariant.py``                           any number of rows in one order of sums
* ``int4_packing.py``     how such weights lie in memory
* ``int4_dequantize.py``  back to dense weights, for training
* ``int4_codes.cuh``, ``int4_whole.cuh``          codes to numbers and sums of whole numbers, for the CUDA C++ kernels
"""
