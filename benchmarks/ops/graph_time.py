"""Times of work in a CUDA graph, for the benchmarks that race kernels without the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def graph_times(calls: Sequence[Callable[[], Any]], replays: int) -> list[float]:
    """Measure the seconds of one call, for each replay of a graph of all of them one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 / len(calls) for start, end in events]
