"""One decoder definition for training and serving.

Costs (no torch):


The model (flat, token-major: ``x_TD`` is tokens by model dim):

* ``decoder.py``: ``Decoder``: embedding, stack of layers, final norm, head
* ``attention.py``, ``mlp.py``: the two halves of a layer; ``moe.py``: experts in place of the second; ``norm.py``:
  ``RMSNorm``, ``LayerNorm``
* ``weights/``: the seam: ``Weight``, a matrix in some number format, its kinds, and ``Projection``, named weights that
  share an input
* ``embedding.py``: ``Embedding``, tables that are gathered from
* ``rope.py``: the angles of rotary embedding and their scalings
* ``context.py``: where keys and values are: ``VarlenContext`` (packed documents, differentiable), ``PagedContext``
* ``streaming/``: layers that live in host memory or in a file, and come to the device in their turn
* ``layer_kv_scales.py``: scales of keys and values in a layer whose cache is fp8
* ``features.py``: hidden states in front of some layers, kept beside the KV cache; ``eagle.py``: a head that drafts
  from them
* ``row_adapters.py``: adapters of which each row of a step may have another one
* ``native.py``: a ``Decoder`` on the C++ CPU kernels; ``fused_stack.py``: its layers on a GPU in fewer kernels

Values on their way into weights:

* ``stored.py``: ``Stored``, a weight of a file that is read when asked for, whole or a part of it; ``staging.py``:
  copies to a device; ``quantized_layouts.py``: layouts of quantized matrices
"""
