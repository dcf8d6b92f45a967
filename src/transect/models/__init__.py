"""One decoder definition for training and serving, and the way of its weights in and out.

What a model is (no torch):
    config.py        ``ModelConfig``, ``RopeConfig``; config_hf.py and config_gguf.py translate files from and to them
    shapes.py        names and shapes of all weights
    cost.py          FLOPs, bytes and memory of a step, from the configuration alone

The model (flat, token-major: ``x_TD`` is tokens by model dim):
    decoder.py       ``Decoder``: embedding, stack of layers, final norm, head
    attention.py     ``Attention``: q, k, v, o projections around ``AttentionContext.attend``
    mlp.py           ``MLP``: gated (SwiGLU) or plain (GELU)
    linear.py        ``Linear``: every weight matrix; quantization, tensor parallelism and LoRA replace only this
    embedding.py     ``Embedding``: tables that are gathered from
    norm.py          ``RMSNorm``, ``LayerNorm``
    rope.py          the frequencies of rotary embedding and their scalings
    context.py       ``AttentionContext``: where keys and values are; ``VarlenContext`` (packed documents,
                     differentiable) or ``PagedContext`` (block tables)

Weights and names:
    resolve.py       a name to a ``ModelSource``; pull.py fetches the built-in model
    weights_hf.py    safetensors in and out; weights_gguf.py: GGUF in
    load.py          ``load_model``: a source to a ``Decoder`` on a device
"""
