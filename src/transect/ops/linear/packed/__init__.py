"""Products by packed weights, a folder for each kind of number.

* ``int4/``       codes of 4 bits in groups with a scale and a zero
* ``eight_bit/``  fp8 and whole numbers of 8 bits with a scale for each output or block
* ``gguf/``       the block types of GGUF files
* ``chain.py`` (``chain.cuh``)              one row: the four products between two attentions in one launch. The kernel
  of ``int4/int4_chain.py``, ``eight_bit/scaled8_chain.py`` and ``gguf/gguf_chain.py``
* ``block_tiles.py`` (``block_tiles.cuh``)  17 to 512 rows on Hopper: the kernel of ``int4/int4_tiles.py`` and
  ``gguf/gguf_tiles.py``, and how a product is cut
"""
