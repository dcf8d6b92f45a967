"""Number formats without torch: one file an entry, and everything else derived from it.

Entries:

* ``dense.py``: float32, bfloat16, float16
* ``fp8.py``, ``int8.py``: 8 bits with a scale for each row
* ``int4.py``: 4 bits in groups; ``gptq.py`` and ``awq.py``: the layouts of these checkpoints
* ``nf4.py``: 4-bit NormalFloat, and the checkpoints of bitsandbytes
* ``gguf.py``: the block types of GGUF files, in files and as a GPU holds them; ``mxfp4.py``: checkpoints in one of them

What they are written in:

* ``number_format.py``: ``NumberFormat``, its uses, and ``Method``
* ``codebook.py``: formats that a list of values describes; ``compressed_tensors.py``: settings of such checkpoints
* ``layouts.py``: how a checkpoint packs a matrix
* ``registry.py``: all formats, found in this folder, and the questions that options, errors and pages ask;
  ``page.py``: their table in the docs
"""
