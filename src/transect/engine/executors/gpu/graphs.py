"""CUDA graphs of whole steps, captured when first needed, all in one pool of memory.

A graph replays the same kernels on the same addresses with one launch. The steps that share a graph differ only in what
their inputs hold. Replays of different graphs follow each other on one stream, so they can share memory for what lies
between inputs and results.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger(__name__)


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the block. A collected engine would free its graphs and memory,
    and those CUDA calls would make a capture fail."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(slots=True)
class GraphCache:
    """Graphs by key, on one stream."""

    stream: torch.cuda.Stream
    most_rare: int = 64
    """Largest number of graphs kept for rare work, which is captured at its second occurrence only."""
    seconds: float = 0.0
    """Time spent on capturing so far."""
    started: bool = False
    """True after start-up; captures from then on delay requests."""
    late: int = 0
    """Captures after start-up."""
    _pool: Any = None
    _graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = field(default_factory=dict)
    _rare: int = 0
    """Graphs captured for rare work."""
    _refused: set[Hashable] = field(default_factory=set)
    _met: dict[Hashable, bool] = field(default_factory=dict)
    """Rare work that has run; True if it has a graph."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def clear(self) -> None:
        """Drop all graphs; the last replay must be complete."""
        self.stream.synchronize()
        self._graphs.clear()
        self._met.clear()
        self._refused.clear()

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Do ``work``, which must launch the same kernels on the same addresses for each use of this key.

        The first time it runs eagerly (kernels are compiled and loaded on the way) and is then captured for the next.
        Returns what ``work`` returns: from then on the tensors of the captured call, which hold their values until the
        next step.
        """
        held = self._graphs.get(key)
        if held is not None:
            held[0].replay()
            return held[1]
        result = work()
        self._tried(key, work)
        return result

    def prepare(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Capture ``work`` without running it: all of its kernels must be on the device already."""
        if key not in self._graphs:
            self._capture(key, work)
            self._met[key] = True

    def run_rare(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Run rare work: like ``run``, but captured only at its second occurrence."""
        if key not in self._graphs:
            if key not in self._met or self._rare >= self.most_rare:
                self._met.setdefault(key, False)
                return work()
            if not self._tried(key, work):
                return work()
            self._met[key] = True
            self._rare += 1
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _tried(self, key: Hashable, work: Callable[[], Any]) -> bool:
        """Capture ``work``; return True if it has a graph afterwards.

        Work without a graph runs kernel by kernel, and the log reports it: an error on one rank of several would leave
        the others waiting for the rest of the step.
        """
        if key in self._refused:
            return False
        try:
            self._capture(key, work)
        except RuntimeError as error:
            self._refused.add(key)
            log.warning("a CUDA graph could not be captured, and its steps run kernel by kernel: %s", error)
            return False
        return True

    def _capture(self, key: Hashable, work: Callable[[], Any]) -> None:
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with without_collector():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                captured = work()
            finally:
                graph.capture_end()
        self._graphs[key] = graph, captured
        self.late += self.started
        self.seconds += time.perf_counter() - started
