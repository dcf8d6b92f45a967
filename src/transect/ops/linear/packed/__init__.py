"""Products by weights of 4 bits in groups, of 8 bits, and in the block types of GGUF files.

* ``int4_matmul.py``      the operator, and which kernel runs; ``triton.py``: the portable ones
* ``int4_rows.py`` (``int4_matmul.cu``)           up to 16 rows
* ``int4_hopper.py`` (``int4_matmul_hopper.cu``)  heads on Hopper
* ``int4_tiles.py`` (``int4_tiles.cu``)           17 to 512 rows on Hopper
* ``int4_packing.py``     how such weights lie in memory
* ``int4_dequantize.py``  back to dense weights, for training
* ``scaled8.py``          fp8 and int8 with a scale for each output: codes are decoded, on any GPU
* ``scaled8_rows.py`` (``scaled8.cu``)            the same, and scales of blocks, up to 16 rows on Hopper
* ``chain.py`` (``chain.cuh``)  one row: the four products between two attentions in one launch;
  ``scaled8_chain.py`` (``scaled8_chain.cu``) of weights in fp8, ``int4_chain.py`` (``int4_chain.cu``) of 4 bits
* ``scaled8_tiles.py``    many rows on Hopper: both sides in 8 bits; ``scaled8_hopper.py`` (``scaled8_hopper.cu``): 17
  to 256 rows in fp8
* ``scaled8_rounding.py`` their rows in 8 bits: alone, with the norm or with the gate before them
* ``gguf_matmul.py``     block types of GGUF files: the operator, and which kernel runs
* ``gguf_layout.py``     how such weights lie in memory
* ``gguf_rows.py`` (``gguf_rows.cu``)             up to 8 rows on Hopper
* ``gguf_tiles.py`` (``gguf_tiles.cu``)           up to 512 rows on Hopper
* ``block_tiles.py`` (``block_tiles.cuh``)        what both have in common: the kernel, and how a product is cut
* ``gguf_chain.py`` (``gguf_chain.cu``, ``gguf_bytes.cuh``)   one row: any product, or the four between two attentions
* ``int4_codes.cuh``, ``int4_whole.cuh``, ``gguf_codes.cuh``: codes to numbers, and sums of whole numbers, for the
  CUDA C++ kernels
"""
