"""One decoder definition for training and serving, and the way of its weights in and out.

What a model is, and what it costs (no torch):

* ``config.py``: ``ModelConfig``, ``RopeConfig``; ``config_moe.py``: ``MoEConfig``
* ``config_hf.py`` (``config_hf_moe.py``, ``config_hf_families.py``, ``config_quantized.py``) and ``config_gguf.py``
  (``config_gguf_families.py``) read and write them
* ``shapes.py``: canonical names and shapes of all weights
* ``storage.py``: bits of a number, by kind of weight; ``cost.py``: FLOPs and bytes of a step; ``memory/``: the memory
  that training and serving need, before they start

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
* ``kv_scales.py``: scales of keys and values for a cache in fp8; ``layer_kv_scales.py``: how a layer uses its own
* ``native.py``: a ``Decoder`` on the C++ CPU kernels; ``fused_stack.py``: its layers on a GPU in fewer kernels

Weights and names:

* ``resolve.py``: a name to a ``ModelSource``; ``pull.py`` fetches the built-in model,
  ``package_index.py`` where there is no pip; ``presets.py``: shapes of
  published models without files; ``own_head.py``: checkpoints that say tied and are not
* ``weights_hf.py``: safetensors in, ``weights_hf_out.py``: out (``safetensors_out.py``: their files);
  ``weights_hf_moe.py``: the names of experts there;
  ``weights_hf_bnb.py``: those that bitsandbytes packed in 4 bits;
  ``weights_hf_quantized.py``: other programs' quantized matrices, in the layouts of ``quantized_layouts.py``;
  ``quantized_codes.py``: the same packed; ``layouts.py``: how a model's checkpoint packs its matrices;
  ``quantize_out.py`` writes such, on the 4-bit values of ``quantized_grid.py``; ``calibration.py``: what matrices are
  multiplied with when a model reads a text; ``gptq.py`` rounds by that
* ``weights_gguf.py``: GGUF in, ``gguf_out.py``: out, where ``gguf_places.py`` says; ``weights_dummy.py``: random
* ``grown.py``: tables with rows for new tokens
* ``adapter.py``: adapters on their way into weights; ``adapter_peft.py``: PEFT's files in and out;
  ``adapter_start.py``: PiSSA and OLoRA as plain LoRA; ``peft_config.py``:
  their settings
* ``stored.py``: what files give: ``Stored``, a weight that is read when asked for, whole or a part of it
* ``load.py``: ``fill``, the one way of stored weights into a model; ``load_model``, ``load_on_device``: a source to a
  ``Decoder``; ``staging.py``: values on their way to a device
"""
