"""Products by weights of 8 bits, fp8 or whole numbers, with a scale for each output or block.

* ``scaled8.py``          a scale for each output: codes are decoded, on any GPU
* ``scaled8_rows.py`` (``scaled8.cu``)            the same, and scales of blocks, up to 16 rows on Hopper
* ``scaled8_hopper.py``   17 to 256 rows on Hopper: ``scaled8_hopper.cu`` in fp8, ``scaled8_hopper_int8.cu``, and
  ``scaled8_hopper_blocks.cu`` with scales of blocks, all by ``scaled8_hopper.cuh``
* ``scaled8_tiles.py``    many rows on Hopper: both sides in 8 bits
* ``scaled8_rounding.py`` their rows in 8 bits: alone, with the norm or with the gate before them
* ``scaled8_chain.py`` (``scaled8_chain.cu``)     one row: the four products between two attentions in one launch
"""
