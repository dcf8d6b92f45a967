"""Races under sustained load: the time of a call at the clock rate that the call's own work causes.

A board keeps within a limit of power, and lowers its clock for work that would draw more. That takes it some hundredths
of a second, so for a few milliseconds every kernel runs at the full clock, where the one that takes less time wins. At
the limit the one that takes less energy wins: n calls of E joules take n E / P seconds on a board of P watts. Decode
steps of 48 rows and more are there on an H200.

So here contenders run for tenths of a second at a time, with no pause. A time counts when two slices in succession
agree. Contenders take turns, every second round in the opposite order, so that slow changes (heat, another program)
come to all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .timing import Calls, Replay, own_stream

SLICE_SECONDS = 0.04
LEAST_SECONDS, MOST_SECONDS = 0.2, 0.6
"""Seconds of a turn before slices are compared, and at most."""
STEADY = 0.005
"""Relative difference of slices at a clock that has settled."""
ROUNDS = 3
BURST_SECONDS = 0.002
"""Replays of a graph between two looks at the device take about as long as this."""
IN_FLIGHT = 3
"""Bursts that the device has been given, so that it never waits."""

Busy = Callable[[float], float]
"""Function that keeps the device busy for some seconds, and returns seconds of one call."""


def settled(busy: Busy) -> float:
    """Time one call in seconds after the clock has adapted to the power of its work: the mean of the last two
    slices."""
    before, now, spent = busy(SLICE_SECONDS), busy(SLICE_SECONDS), 2 * SLICE_SECONDS
    while spent < LEAST_SECONDS or (abs(now - before) > STEADY * before and spent < MOST_SECONDS):
        before, now = now, busy(SLICE_SECONDS)
        spent += SLICE_SECONDS
    return (before + now) / 2


def in_turns(turns: Sequence[Callable[[], float]], rounds: int = ROUNDS) -> list[float]:
    """Return the median over the rounds of each turn's results."""
    times: list[list[float]] = [[] for _ in turns]
    for number in range(rounds):
        order = list(zip(turns, times, strict=True))
        for turn, mine in reversed(order) if number % 2 else order:
            mine.append(turn())
    return [statistics.median(mine) for mine in times]


def race(contenders: Sequence[Calls]) -> list[float]:
    """Time one call of each contender in seconds under load, in CUDA graphs of its calls one after another. A graph
    lives for one turn, so only one contender's results take memory at a time."""
    return in_turns([partial(_turn, calls) for calls in contenders])


def _turn(calls: Calls) -> float:
    with own_stream():
        replay = Replay(calls)
        replay()
        once = _busy(replay, 1, 0.0)
        burst = max(1, int(BURST_SECONDS / max(once, 1e-7)))
        return settled(partial(_busy, replay, burst)) / len(calls)


def _busy(replay: Replay, burst: int, seconds: float) -> float:
    """Time one replay in seconds, over consecutive bursts that take ``seconds``; one burst at least."""
    first, count = _mark(), 0
    marks, end = deque([first]), time.perf_counter() + seconds
    while count == 0 or time.perf_counter() < end:
        for _ in range(burst):
            replay()
        count += burst
        marks.append(_mark())
        if len(marks) > IN_FLIGHT:
            marks.popleft().synchronize()
    marks[-1].synchronize()
    return first.elapsed_time(marks[-1]) * 1e-3 / count


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
