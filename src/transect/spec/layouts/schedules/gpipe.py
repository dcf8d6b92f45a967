"""GPipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965).

Every micro-batch's activations are kept at once.
"""

from .pipeline_schedule import PipelineSchedule

GPIPE = PipelineSchedule(name="gpipe", ahead=lambda rank, stages, micro_batches, chunks: micro_batches)
