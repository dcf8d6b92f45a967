"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): each rank has several runs of layers, ``chunks``.

A micro-batch passes each rank ``chunks`` times, and a bubble is as many times shorter.
"""

from .pipeline_schedule import PipelineSchedule


def ahead(rank: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Return the passes ahead of ``rank``: one group of micro-batches through all chunks but the last, and 1F1B's."""
    if micro_batches == stages:
        return micro_batches * chunks
    return 2 * (stages - rank - 1) + (chunks - 1) * stages


INTERLEAVED = PipelineSchedule(name="interleaved", ahead=ahead, chunked=True)
