"""Kinds of weight: one matrix in some number format, and its operations.

* ``weight.py``: ``Weight``, the seam between matrices and everything that computes with them, and its abilities
* ``projection.py``: ``Projection``, named weights that share an input
* ``dense.py``: numbers of a float type, trained or not
* ``int4.py``: 4-bit codes in groups, rebuilt for each product (training); ``int4_serving.py``: multiplied as they are
* ``scaled8.py``: fp8 or whole numbers of 8 bits, with a scale for each output
* ``gguf_blocks.py``: the block types of GGUF files on a GPU, multiplied as they are; ``in_blocks.py``: how such weights
  and those of ``int4_serving.py`` are joined
* ``nf4.py``: 4-bit NormalFloat with double quantization, rebuilt for each product (training)
* ``listed.py``: codes of a codebook, rebuilt for each product (inference)
* ``rebuilt.py``: the product of those that are rebuilt
* ``packed.py``: the formats of GGUF files on the C++ CPU kernels
* ``as_stored.py``: whichever of these a checkpoint packs a matrix as; ``kinds.py``: which a model has
* ``low_rank.py``: the factors of an adapter; ``adapted.py``: them beside any of these kinds;
  ``adapted_product.py``: both as one operator on a CPU; ``dropout.py``: of its input.
  ``adapted_embedding.py``: the same beside an embedding's table. ``row_adapted.py``: for each row of a step the factors
  of its own adapter
"""
