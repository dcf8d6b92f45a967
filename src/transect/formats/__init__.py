"""Packed numbers and the files that hold them, with NumPy: no torch at this level. ``spec/numbers`` describes them.

* ``affine``: ``AffineGroups``, the one form that every packed type here can be written in: ``scale * code + zero``,
  with one scale and one zero for each group of columns.
* ``ggml_blocks``: readers of the block types of GGUF files, and ``QuantizedTensor``: packed rows with ``dequantize``,
  ``affine`` and ``rows``.
* ``ggml_quantize``: float32 to these types, rounding as ggml does; ``ggml_k_types``: to the K types; ``ggml_search``:
  scales for groups of numbers that leave the smallest error.
* ``gguf_file``: ``GGUFFile.open``: metadata and tensors of a GGUF file, memory-mapped and checked before use.
* ``gguf_write``: such a file, written tensor by tensor.
"""
