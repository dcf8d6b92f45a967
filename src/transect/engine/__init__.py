"""The inference engine: requests go in, tokens come out. The engine knows token ids only; text is made above it.

Plain Python without tensors, so that it can be fuzzed, simulated and replayed:

* ``sampling_params``: what a request asks of the sampler and when it ends.
* ``request``: ``Request`` as it arrives; ``RequestState`` and ``Sequence``, what is remembered about it.
* ``outputs``: ``EngineOutput`` (news of one choice), ``RequestTimes``, ``SchedulerStats``.
* ``batch``: ``ScheduledBatch`` and ``StepResult``, and the protocols ``Executor`` and ``Clock``.
* ``kv_cache``: the pool of KV blocks, reference counts, the prefix cache. ``sequence_blocks``: which blocks sequences
  have, copy-on-write, and giving back what steps in flight use.
* ``scheduler_config``: the numbers that steer the scheduler. ``limits``: whether a request can ever fit.
* ``step_budget``: how many tokens a step may have while sequences decode. ``costs/learning`` learns step times.
  ``filling``: when prompts may be computed little by little.
* ``arrivals``: the sequences of a request that arrives, their ranks and seeds.
* ``waiting_queue``: who waits, in which order, and when the queue is full.
* ``scheduler``: who runs in the next step; admission, preemption, forks, and what a step's tokens change.
  ``plan``: a step while it is planned. ``failures``: which choices the errors of a step end.
* ``decisions``: the decision log, what was decided in every step and why others waited, in memory and on disk.
  ``decision_setup``: its header, with tensors.
* ``jump_ahead``: tokens that a grammar forces.
* ``constraint``: which tokens may come next in an answer that has a form, as the engine sees it.
* ``clock``: the wall clock and a virtual one.
* ``core``: ``EngineCore``, the loop that plans, submits and commits, at once or one step ahead of the device.

With tensors, or on the way to them:

* ``config``: ``EngineConfig``, everything a user can set. ``build``: from it to a running engine.
* ``ranks``: one engine on several ranks. ``leading``: the core of the one that leads, and of those that follow.
  ``sharing``: those of groups of ranks that have requests of their own.
* ``kv_size``: how many KV blocks to have. ``offload``: which layers stream from host memory or a file.
  ``host_room``: whether the weights fit in the memory of the host.
* ``runner``: ``Runner``, the executor that runs the model on ragged batches. ``prompt_results``: what its steps say
  about prompts.
* ``stage_runner``: the executor of one stage of a pipeline.
* ``gpu/``: the executor for a GPU, and what it needs to start.
* ``sampler``, ``penalties``: from logits to tokens; draws depend on seed, choice and position alone
  (``ops/lang/philox``).
* ``pooling``: vectors of prompts. ``scoring``: how likely a query is after a document.
* ``beam_search``: the likeliest answers as a whole, over requests of one token.
* ``llm``: ``LLM``, the engine in the caller's process. ``inputs``: the forms in which prompts may come.
  ``interrupts``: Ctrl-C between steps. ``vllm_arguments``: what programs written for vLLM pass.
* ``async_engine``, ``process``, ``wire``: ``AsyncEngine``, the engine in another process, and the messages between.
  ``replicas``, ``router``: several of them behind one face, and which gets a request.
  ``mailbox``: where a request's news wait for its task. ``socket_folder``: where their socket lies.
  ``grammar_queue``: requests whose grammars are being compiled.
  ``collector``: the garbage collector in a process that serves.
"""
