"""Causal attention through the block table of a paged KV cache.

* ``paged_attention.py``        the operator; ``paged_attention_torch.py``: in torch; ``dispatch.py``: on a GPU, which
                                kernel runs
* ``prefill.py``                prefill chunks; ``prefill_hopper.py``: for Hopper, with ``prefill_copies.py``
* ``decode.py``                 rows of one query; ``decode_hopper.py`` (``paged_decode_hopper.cu``): for Hopper
* ``decode_spans.py``           the same with sums that do not depend on the batch (``paged_spans_hopper.cu``)
* ``tile.py``                   what the Triton kernels share; ``launch.py``: arguments of their launches
* ``batch.py``                  the ragged batch of a step, and what is worked out from it once a step
* ``kv_cache_write.py``         keys and values into the cache
* ``cache_codes.py``            a cache in int8, with a scale for each head of a token
* ``rotary_kv_write.py``        rotation, QK norm and the write to the cache in one kernel
"""
