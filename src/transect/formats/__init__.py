"""Number formats, plain and packed, and the files that hold them. NumPy only: no torch at this level.

* ``affine``: ``AffineGroups``, the one form that every packed type here can be written in: ``scale * code + zero``,
  with one scale and one zero for each group of columns.
* ``ggml_blocks``: the block types of GGUF files (plain, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, MXFP4) and
  ``QuantizedTensor``: packed rows with ``dequantize``, ``affine`` and ``rows``.
* ``ggml_quantize``: float32 to these types, rounding as ggml does; ``ggml_k_types``: to the K types; ``ggml_search``:
  scales for groups of numbers that leave the smallest error.
* ``nf4``: the codes of 4-bit NormalFloat and the map of its scales.
* ``gguf_file``: ``GGUFFile.open``: metadata and tensors of a GGUF file, memory-mapped and checked before use.
* ``gguf_write``: such a file, written tensor by tensor.
"""
