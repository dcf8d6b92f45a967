"""One decoder definition for training and serving.

The model (flat, token-major: ``x_TD`` is tokens by model dim):

* ``decoder.py``: ``Decoder``: embedding, stack of layers, final norm, head
* ``attention.py``, ``mlp.py``: the two halves of a layer; ``moe.py``: experts in place of the second; ``norm.py``:
  ``RMSNorm``, ``LayerNorm``
* ``embedding.py``: ``Embedding``; ``rope.py``: angles of rotary embedding and their scalings
* ``context.py``: locations of keys and values: ``VarlenContext`` (packed documents, differentiable),
  ``PagedContext`` (KV cache)
* ``weights/``: ``Weight``, a matrix in some number format, and ``Projection``, weights that share an input
* ``row_adapters.py``: adapters that differ between the rows of a step
* ``layer_kv_scales.py``: scales of keys and values for an fp8 cache
* ``features.py``: hidden states before some layers, cached beside KV; ``eagle.py``: a draft head that reads them

Faster stacks of the same layers:

* ``native.py``: the C++ kernels of a CPU; ``fused_stack.py``: fewer kernels on a GPU
* ``streaming/``: layers in host memory or in a file, copied to the device when they run

Loading weights:

* ``stored.py``: ``Stored``, a weight of a file, read on demand; ``staging.py``: copies to a device;
  ``quantized_layouts.py``: layouts of quantized matrices
"""
