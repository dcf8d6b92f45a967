"""Operators, one file each, top to bottom: the math, a readable reference, implementations, gradient, cost, examples.

registry.py          ``Op``, ``Implementation``, ``Cost``: what an operator file declares; tests, benchmarks and
                     inspection are derived from it
opset.py             ``resolve_ops``: picks an implementation of every operator for a device, once
numerics.py          dtypes to compute in, sample inputs

linear.py            matrix product with bias
rms_norm.py          RMSNorm
layer_norm.py        LayerNorm
rotary.py            rotary position embedding of q and k
swiglu.py, gelu.py   activations of the MLP
attention.py         causal attention over packed documents (training, prefill)
paged_batch.py       the ragged batch of an engine step, and what is worked out from it once per step
kv_cache_write.py    keys and values into the paged cache
paged_attention.py   causal attention through the block table
cpu/                 the C++ kernels for the processor
"""
