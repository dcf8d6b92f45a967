"""Run scheduled batches on a device: tensors begin here.

* ``runner``: ``Runner``, the executor that runs the model on ragged batches. ``prompt_results``: log-probabilities and
  vectors of prompts.
* ``drafted``: verifies drafts with any executor: each draft is a row of one token.
* ``head_runner``: runs an EAGLE-3 head.
* ``adapter_slots``: which adapter is in which slot of the device.
* ``stage_runner``: the executor of one pipeline stage.
* ``sampler``, ``penalties``: from logits to tokens; draws depend on seed, choice and position alone
  (``ops/lang/philox``).
* ``pooling``: vectors of prompts.
* ``gpu/``: the executor for a GPU: CUDA graphs, sampling on the device, start-up.
"""
