"""Operators in families. Each operator has one file: math, a readable reference, gradient, cost, its registry entry.

Begin with ``first/vector_add.py``, which has every part of an operator at its smallest.

Families (each folder's docstring is its map):

* ``first/``       where to begin: vector add, sum, dot, softmax, a ladder of matrix products in CUDA C++
* ``norm/``        RMSNorm, with and without the residual added first, and LayerNorm
* ``activation/``  GELU and SwiGLU
* ``position/``    rotary embedding; the embedding rows that a step begins with
* ``linear/``      matrix products: ``many_rows/`` (tensor cores), ``few_rows/`` (bytes), ``packed/`` (fewer bits)
* ``attention/``   ``packed/`` documents (training, whole prompts) and the ``paged/`` KV cache (serving)
* ``moe/``         mixture of experts: gating, order, products by expert, weighted sum
* ``sampling/``    penalties and masks on logits, and the next token of every row
* ``loss/``        cross entropy without the logits
* ``optim/``       AdamW over all tensors at once, and weights rounded by chance
* ``comm/``        copies between host and device, sums between GPUs

The kernels stand beside the operator's file.

What every operator leans on:

* ``lang/``        how kernels are written, compiled and found
* ``registry.py``  ``Op``, ``Implementation``: tests, benchmarks and inspection are derived from these entries
* ``opset.py``     ``resolve_ops`` picks an implementation of every operator of a decoder for a device, once
* ``numerics.py``  dtypes to compute in, sample inputs
* ``tuning.py``, ``tuned/``: launch configurations found on a device; ``shapes.py``: true shapes of known models
* ``peers.py``     ``torch.compile`` as a peer

``cpu/`` has the C++ kernels for the processor, ``tools/`` what is derived from the registry.
"""
