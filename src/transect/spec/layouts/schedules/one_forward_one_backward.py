"""1F1B: after a few forward passes one backward pass for each forward pass (Narayanan et al. 2019, PipeDream-Flush).

The bubbles are those of gpipe; a stage keeps the activations of at most as many micro-batches as stages follow it.
"""

from .pipeline_schedule import PipelineSchedule

ONE_FORWARD_ONE_BACKWARD = PipelineSchedule(
    name="1f1b", ahead=lambda rank, stages, micro_batches, chunks: stages - rank - 1
)
