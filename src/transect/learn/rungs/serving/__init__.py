"""An engine that serves: ``tokenizer``, ``sampler``, ``kv_cache``, ``paged_attention``, ``scheduler``,
``prefix_cache``.
"""
