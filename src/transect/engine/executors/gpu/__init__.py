"""Run the engine on a GPU: the executor, its CUDA graphs and its start-up.

* ``options.py``: ``GPUOptions``, switches of the GPU optimizations
* ``build.py``: start-up, as a recipe; its parts, in order: ``setup.py`` decides what the engine does, ``load.py`` loads
  the model and its kernels, ``measure.py`` runs the largest step, ``size.py`` sizes the KV cache, ``capture.py`` makes
  the runner and its graphs (``startup_times.py`` times each)
* ``warm_kernels.py``: which kernels an engine needs; ``compilers.py``: processes that compile them meanwhile
* ``runner.py``: ``GPURunner``, the executor; it works a step ahead of its tokens; ``stage_runner.py``: that of a stage
  of a pipeline, ``sharing_runner.py``: that of a rank which shares experts
* ``head.py``: an EAGLE-3 head, its memory and its graphs; ``head_runner.py``: its executor
* ``pending_step.py``: a step on its way, and how what it drew is read
* ``step_plan.py``: a batch laid out as a step; ``step_sizes.py``: the few sizes that steps have
* ``sequence_table.py``: what is known about recent sequences; ``step_inputs.py``: a step's numbers in one piece of
  memory
* ``step_ring.py``: that memory for the steps in flight, and its way to the device
* ``graphs.py``: CUDA graphs of steps
* ``mask_table.py``: masks of grammars on their way to the device
* ``device_sampling.py``, ``adjust_state.py``: draws, penalties and logprobs on the device
"""
