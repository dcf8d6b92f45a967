"""Kernels in Triton: ``vector_add``, ``total``, ``dot``; products: ``matmul_naive``, ``matmul_tiled``,
``matmul_vectorized`` (C++); ``softmax``, ``gelu``, ``rms_norm``, ``rope``; ``attention``, ``flash_attention``;
``int4_product``.
"""
