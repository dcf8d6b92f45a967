"""Operators, one file each, top to bottom: the math, a readable reference, implementations, gradient, cost, examples.

What all of them lean on:

* ``registry.py``: ``Op``, ``Implementation``, ``Cost``: what an operator file declares; tests, benchmarks and
  inspection are derived from it, in ``tools/``
* ``opset.py``: ``resolve_ops`` picks an implementation of every operator of the decoder for a device, once
* ``numerics.py``: dtypes to compute in, sample inputs; ``counting.py``: how much causal attention looks at
* ``jit.py``: where Triton kernels run; ``tiles.py``: what kernels on tiles share; ``cuda_build.py``: builds the ``.cu``
  files, ``cuda.py``: calls them; ``collecting.py``: which Triton kernels some work needs, found without launching any
* ``norms.py``: what the four norms share; ``peers.py``: ``torch.compile`` as a peer
* ``tuning.py``, ``tuned/``: launch configurations found on a device; ``shapes.py``: true shapes of known models

Begin with ``vector_add.py``, which has every part of an operator at its smallest; then ``sum.py``, ``dot.py``,
``softmax.py``.

Products:

* ``linear.py``: matrix product with bias; on a GPU one of the two below, by the number of rows
* ``matmul.py``: many rows, with fused epilogues; ``matmul_kernels.py``: its device code; ``matmul_tiles.py``: how it is
  cut; ``matmul_ladder.py``: in CUDA C++, from naive to tensor cores
* ``small_matmul.py``: up to 256 rows, bound by the weight's bytes; ``small_matmul_triton.py``: its Triton kernels;
  ``small_matmul_gluon.py``: small weights on Hopper, asked for before the input is there;
  ``small_matmul_cuda.py``: up to 16 rows, or 32 of a small weight; ``small_matmul_hopper.py``: from 17 rows on Hopper;
  ``stream_products.py``: with the norms between products in them
* ``gate_up.py``: gate and up projections of an MLP in one product, with the gate
* ``int4_matmul.py``: by 4-bit weights; ``int4_rows.py``, ``int4_hopper.py``: for few rows on Hopper;
  ``int4_packing.py``: how such weights lie in memory; ``int4_dequantize.py``: back to the weights, for training

Of a decoder layer:

* ``rms_norm.py``, ``layer_norm.py``; ``add_rms_norm.py``, ``add_layer_norm.py``: with the residual added first
* ``rotary.py``: rotary position embedding of q and k
* ``swiglu.py``, ``gelu.py``: activations of the MLP; ``softmax.py``: over the last dimension, by itself;
  ``softmax_kernels.py``: its device code
* ``attention.py``: causal attention over packed documents (training, whole prompts): on a GPU ``flash_attention.py``,
  ``flash_attention_backward.py`` (what they share: ``attention_tiles.py``), and for Hopper
  ``flash_attention_hopper.py``, ``flash_attention_backward_hopper.py``
* ``paged_batch.py``: the ragged batch of an engine step, and what is worked out from it once per step
* ``kv_cache_write.py``: keys and values into the paged cache; ``rotary_kv_write.py``: both in one launch, with the
  QK-norm of some models before
* ``paged_attention.py``: causal attention through the block table: in torch ``paged_attention_torch.py``, on a GPU
  ``paged_prefill.py`` for prefill chunks (for Hopper ``paged_attention_hopper.py``) and ``paged_decode.py`` for rows of
  one query (for Hopper ``paged_decode_hopper.py``); what the Triton kernels share: ``paged_tile.py``

Before and after the layers, and for training:

* ``ring_copy.py``: a step's inputs from the host's memory and its results there, as kernels of its graph
* ``embed_tokens.py``: what a step begins with, embeddings and rotations of its tokens
* ``mask_logits.py``: tokens that a grammar does not allow
* ``adjust_logits.py``: bias, masks and penalties; ``sampling.py``: the next token of every row, on the device;
  ``philox.py``: its random numbers, without a state
* ``linear_cross_entropy.py``: the loss without the logits; ``linear_cross_entropy_torch.py``,
  ``linear_cross_entropy_cpu.py``: without a GPU
* ``adamw.py``: one step of the optimizer over all tensors

``cpu/`` has the C++ kernels for the processor, ``*.cu`` the CUDA C++ versions beside the Triton files; what those of a
decode step share is in ``few_rows.cuh``, those for Hopper in ``hopper.cuh``, those for 4-bit weights in
``int4_codes.cuh`` and ``int4_whole.cuh``, and how a source is compiled in parts in ``parts.cuh``.
"""
