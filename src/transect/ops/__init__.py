"""Operators, one file each, top to bottom: the math, a readable reference, implementations, gradient, cost, examples.

What all of them lean on:

* ``registry.py``: ``Op``, ``Implementation``, ``Cost``: what an operator file declares; tests, benchmarks and
  inspection are derived from it, in ``tools/``
* ``opset.py``: ``resolve_ops`` picks an implementation of every operator of the decoder for a device, once
* ``numerics.py``: dtypes to compute in, sample inputs; ``counting.py``: how much causal attention looks at
* ``jit.py``: where Triton kernels run; ``tiles.py``: what kernels on tiles share; ``cuda.py``: builds the ``.cu`` files
* ``norms.py``: what the four norms share; ``peers.py``: ``torch.compile`` as a peer
* ``tuning.py``, ``tuned/``: launch configurations found on a device; ``shapes.py``: true shapes of known models

Operators of the decoder:

* ``linear.py``: matrix product with bias
* ``rms_norm.py``, ``layer_norm.py``; ``add_rms_norm.py``, ``add_layer_norm.py``: with the residual added first
* ``rotary.py``: rotary position embedding of q and k
* ``swiglu.py``, ``gelu.py``: activations of the MLP
* ``attention.py``: causal attention over packed documents (training, whole prompts)
* ``paged_batch.py``: the ragged batch of an engine step, and what is worked out from it once per step
* ``kv_cache_write.py``: keys and values into the paged cache; ``rotary_kv_write.py``: both in one launch, with the
  QK-norm of some models before
* ``paged_attention.py``: causal attention through the block table
* ``sampling.py``: the next token of every row, on the device; ``philox.py``: its random numbers, without a state
* ``cpu/``: the C++ kernels for the processor

Operators on the GPU that no model runs on yet:

* ``vector_add.py`` (begin here), ``sum.py``, ``dot.py``, ``softmax.py``
* ``matmul.py``: tiled and persistent, with fused epilogues; ``small_matmul.py``: few rows; ``int4_matmul.py``
* ``flash_attention.py``, ``flash_attention_backward.py`` (what they share: ``attention_tiles.py``), and for Hopper
  ``flash_attention_hopper.py``, ``flash_attention_backward_hopper.py``
* ``linear_cross_entropy.py``: the loss without the logits
* ``*.cu``: CUDA C++ versions of some of them, the ladder of matrix products among them
"""
