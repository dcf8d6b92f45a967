"""Products by weights in the block types of GGUF files, in the file's own bits.

* ``gguf_matmul.py``  the operator, and which kernel runs
* ``gguf_layout.py``  how such weights lie in memory
* ``gguf_rows.py`` (``gguf_rows.cu``)    up to 8 rows on Hopper
* ``gguf_tiles.py`` (``gguf_tiles.cu``)  up to 512 rows on Hopper
* ``gguf_row.py`` (``gguf_row.cu``)  one row
* ``gguf_chain.py`` (``gguf_chain.cu``)  one row, the four products between two attentions in one launch
* ``gguf_codes.cuh``, ``gguf_bytes.cuh`` codes to numbers and sums of whole numbers, for the CUDA C++ kernels
"""
