"""The inference engine: requests go in, tokens come out. The engine knows token ids only; text is made above it.

* ``scheduling/``: the scheduler, KV blocks, requests and the engine loop, without tensors. Start here.
* ``executors/``: run scheduled batches on CPUs, GPUs and pipeline stages.
* ``frontends/``: ``LLM``, ``AsyncEngine``, replicas.

From settings to a running engine:

* ``config``: ``EngineConfig``, all settings of a user. ``device``: the device that it names.
  ``build``: from it to a running engine.
* ``kv_size``: the number of KV blocks. ``offload``: layers that stream from host memory or a file.
  ``numerics``: a fingerprint of what its bits depend on.
* ``adapters``: adapters in host memory, for requests that name them.
* ``drafting``: the model that drafts, beside the engine's own. ``heads``: a head that drafts, on a CPU.
* ``decision_setup``: the decision log's header.
* ``ranks``: one engine on several ranks. ``leading``: the cores of the leading rank and of the following ones.
  ``sharing``: cores of data-parallel groups, each with its own requests.
"""
