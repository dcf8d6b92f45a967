"""Time one call: in a CUDA graph of many, eagerly between two events, or on the CPU.

All timing happens on a separate stream, so that the launches of autograd (on the stream of its forward pass) are
captured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

REPLAYS = 15
WARM_SECONDS = 0.02
"""The device is kept busy this long before the first time counts, so that clocks have settled."""

Calls = Sequence[Callable[[], Any]]


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def own_stream() -> Iterator[None]:
    """Use the device's side stream, always the same one, for the length of a block."""
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Replay:
    """A CUDA graph that holds calls one after another; to call it is to replay it. Make it, and call it, within
    ``own_stream``."""

    def __init__(self, calls: Calls) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        self._kept: list[Any] = []  # every call's result, so that no two of them share memory
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            self._kept.extend(call() for call in calls)

    def __call__(self) -> None:
        self._graph.replay()


def time_graph(calls: Calls, replays: int = REPLAYS) -> list[float]:
    """Time one call in seconds, for each replay of a CUDA graph that holds ``calls`` one after another.

    Each call runs once before. So work at the first call on an input (such as repacking a weight) is not timed.
    """
    with own_stream():
        return [seconds / len(calls) for seconds in _events(Replay(calls), replays)]


def time_eager(calls: Calls, replays: int = REPLAYS) -> list[float]:
    """Time one call in seconds between two events, launch included; for calls that cannot be captured."""
    with own_stream():

        def work() -> None:
            for call in calls:
                call()

        return [seconds / len(calls) for seconds in _events(work, replays)]


def _events(work: Callable[[], Any], replays: int) -> list[float]:
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_SECONDS:
        work()
        torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in pairs:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


def time_host(calls: Calls, replays: int = REPLAYS, seconds: float = 0.5) -> list[float]:
    """Time one call in seconds by the clock, after one that does not count; fewer replays when they take
    ``seconds``."""
    for call in calls[:1]:
        call()
    times = []
    begun = time.perf_counter()
    for replay in range(replays):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) / len(calls))
        if replay >= 2 and time.perf_counter() - begun > seconds:
            break
    return times
