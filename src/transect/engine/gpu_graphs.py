"""CUDA graphs of whole steps, captured when first needed, all in one pool of memory.

A graph replays the same kernels on the same addresses with one launch. The steps that share a graph differ only in what
their inputs hold. Replays of different graphs follow each other on one stream, so they can share memory for what lies
between inputs and results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class GraphCache:
    """Graphs by key, on one stream."""

    stream: torch.cuda.Stream
    seconds: float = 0.0
    """Spent on capturing so far."""
    _pool: Any = None
    _graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Do ``work``, which must launch the same kernels on the same addresses whenever it has this key.

        The first time it runs eagerly (kernels are compiled and loaded on the way) and is then captured for the next.
        Returns what ``work`` returns: from then on the tensors of the captured call, which hold their values until the
        next step.
        """
        held = self._graphs.get(key)
        if held is not None:
            held[0].replay()
            return held[1]
        result = work()
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            captured = work()
        finally:
            graph.capture_end()
        self._graphs[key] = graph, captured
        self.seconds += time.perf_counter() - started
        return result

    def forget(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Drop the graphs whose keys are unwanted, because addresses that they hold are no longer true."""
        stale = [key for key in self._graphs if unwanted(key)]
        if stale:
            self.stream.synchronize()
        for key in stale:
            del self._graphs[key]
