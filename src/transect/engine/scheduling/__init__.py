"""Decide which requests run in each step. Plain Python without tensors: it can be fuzzed, simulated and replayed.

* ``sampling_params``: sampling settings and end conditions of a request.
* ``request``: ``Request`` as it arrives; ``RequestState`` and ``Sequence``, the engine's state of it.
* ``outputs``: ``EngineOutput`` (new tokens of one choice), ``RequestTimes``, ``SchedulerStats``.
* ``batch``: ``ScheduledBatch`` and ``StepResult``, and the protocols ``Executor`` and ``Clock``.
* ``kv_cache``: the pool of KV blocks, reference counts, the prefix cache. ``sequence_blocks``: block tables of
  sequences, copy-on-write, and blocks that steps in flight still use.
* ``scheduler_config``: settings of the scheduler.
* ``arrivals``: checks that a new request can ever fit; its sequences, their ranks and seeds.
* ``waiting_queue``: waiting sequences, their order, and the bound of the queue.
* ``scheduler``: builds the batch of the next step: admission, preemption, forks. ``plan``: a step in the making.
  ``bookkeeping``: the state of all requests, and the effects of a step's tokens.
* ``decisions``: the decision log, in memory and on disk. ``snapshot``: block tables and the queue at one moment.
* ``jump_ahead``: tokens that a grammar forces. ``constraint``: allowed next tokens, as bits.
* ``clock``: the wall clock and a virtual one.
* ``core``: ``EngineCore``, the loop that plans, submits and commits, at once or one step ahead of the device.
* ``simulation``: an engine on a virtual clock. ``virtual_device``: its device, whose steps take given times. ``leap``:
  many alike steps at once.
* ``policies/``: step size, prefill beside decoding, drafts, routing, scaling. ``drafters/``: guesses of next tokens.
"""
