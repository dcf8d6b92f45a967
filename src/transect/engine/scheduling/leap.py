"""Many decode steps at once, in a simulation. While all sequences decode and none can be admitted, nothing is left to
decide: each has one token a step, until its last one. ``leap`` brings an engine into the state in which that many calls
of ``EngineCore.step`` would have left the engine. Blocks are taken, registered and freed in the order of those steps,
so the prefix cache forgets the same ones; the first and the last token of an answer are committed by the scheduler
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ...costs.steps import StepLoad
from .batch import ScheduledBatch, ScheduledRow, StepResult
from .request import Sequence

if TYPE_CHECKING:
    from .core import EngineCore
    from .scheduler import Scheduler
    from .virtual_device import VirtualDevice

DecodeSeconds = Callable[[StepLoad], float]
"""Seconds of a step that only decodes."""

Lesson = tuple[StepLoad, float, int]
"""Work of like steps, their mean seconds, and their number."""
MOST = 4096
STRAIGHT = 1e-12
"""Relative distance of a step's time from the chord, from rounding alone."""
_PLANNED, _COMMITTED = 0, 1
_BLOCK, _LAST_TOKEN = 0, 1


class Leap(NamedTuple):
    """Steps that were taken together.

    Attributes:
        moments: when the tokens of each call of ``EngineCore.step`` were known.
        tokens: the sequences that ran, each with the number of its tokens that are known now: one for each of the first
            moments. Some of these sequences have ended.
    """

    moments: list[float]
    tokens: list[tuple[Sequence, int]]


def leap(core: EngineCore, device: VirtualDevice, until: float, seconds: DecodeSeconds) -> Leap | None:
    """Advance ``core`` by the steps that are certainly alike and end by ``until``; None if there are none."""
    scheduler, lag = core.scheduler, core.lag
    if (device.free_at if lag else device.clock.time) >= until or not _only_decodes(core):
        return None
    running, waiting = list(scheduler.running), scheduler.waiting
    left = [seq.max_length - seq.length for seq in running]
    until_one_ends = len(waiting) > 0
    if scheduler.arrivals.order.shared:
        several = len({seq.request.spec.client for seq in (*running, *waiting)}) > 1
        until_one_ends = until_one_ends or several  # it may change whose turn it is
        if (several and len(waiting)) or scheduler.budget.rows(running, waiting).seconds < math.inf:
            return None
    most = min((min if until_one_ends else max)(left) - 1 + lag, MOST)
    if most < 1 or (most := _room(scheduler, running, left, most)) < 1:
        return None
    moments = _moments(core, device, running, left, most, until, seconds)
    return Leap(moments, _advance(core, device, running, left, moments)) if moments else None


def _only_decodes(core: EngineCore) -> bool:
    """Return True if the next step has a row of one token for each running sequence that has tokens left, and the step
    in flight, if there is one, a row for each running sequence."""
    scheduler, lag = core.scheduler, core.lag
    running = scheduler.running
    if scheduler.speculation is not None or not running or scheduler._cut:
        return False
    if len(core._in_flight) != lag or core._ready or scheduler.blocks.returns_pending or len(running) > core._graph:
        return False
    if lag and not (scheduler._last and scheduler._last[-1] == running):
        return False
    return all(map(_decodes, running)) and scheduler.admits_none()


def _decodes(seq: Sequence) -> bool:
    return seq.length - seq.scheduled == 1 and seq.shared_block is None and (seq.plain or _becomes_plain(seq))


def _becomes_plain(seq: Sequence) -> bool:
    """Return True if the first token of ``seq`` is in flight, and its outputs are tokens alone."""
    spec = seq.request.spec
    told = spec.params.logprobs is None and spec.params.prompt_logprobs is None and spec.pooling is None
    return seq.request.prompt_done and seq.first_token_time is None and seq.constraint is None and told


def _room(scheduler: Scheduler, running: list[Sequence], left: list[int], most: int) -> int:
    """Count the steps that are certain to find blocks, up to ``most``."""
    size, free = scheduler.config.block_size, scheduler.cache.num_free
    needed = 0
    for seq, rows in zip(running, left, strict=True):
        needed += max(0, -(-(seq.length + min(most, rows) - 1) // size) - len(seq.block_ids))
    return most if needed <= free else free // len(running) * size


def _moments(
    core: EngineCore,
    device: VirtualDevice,
    running: list[Sequence],
    left: list[int],
    most: int,
    until: float,
    seconds: DecodeSeconds,
) -> list[float]:
    """Let the device take up to ``most`` steps, and note their times. Returns the ends of the steps, or with
    a lag those of the steps before each."""
    host, lag, warmth = device.host, core.lag, device.warmth
    rows, keys = len(running), sum(seq.length for seq in running)
    ends = sorted((count, seq.length + count) for seq, count in zip(running, left, strict=True))
    gone = 0
    lessons: list[Lesson] = []
    found: list[float] = []
    end = device.free_at if lag else device.clock.time
    gap = 0.0 if lag else host
    while len(found) < most and end < until:
        while ends[gone][0] == len(found):  # it has had its last row
            rows, keys, gone = rows - 1, keys - ends[gone][1], gone + 1
        count = min(most, ends[gone][0]) - len(found)
        taken, more = _line(rows, keys, count, seconds)
        if more is None:
            count = 1
        first, began, before = keys, end, len(found)
        for _ in range(count):
            if end >= until:
                break
            if lag and taken <= host:  # the host is what it waits for
                most = len(found)
                break
            step = taken if warmth is None else warmth.step(rows, end + gap, taken)
            found.append(end if lag else end + step + gap)
            end += step + gap
            device.busy += step
            keys += rows
            taken += more or 0.0
        count = len(found) - before
        if count:
            mean = (first + keys - rows) // 2
            lessons.append((StepLoad(rows, mean, 0, rows, 0, rows), (end - began) / count, count))
    if found:
        if core._timed:
            _note(core, device, lessons)
        device.steps += len(found)
        device.free_at = end
        device.clock.advance(max(0.0, found[-1] - device.clock.time))
        core._ended, core._launched_large = found[-1], False
    return found


def _note(core: EngineCore, device: VirtualDevice, lessons: list[Lesson]) -> None:
    """Add the steps whose tokens are known now to the lessons of the device. With a lag the step in flight is the first
    of them, and the last one is still in flight."""
    if core.lag:
        step, (load, seconds, count) = core._in_flight[0], lessons.pop()
        if count > 1:
            lessons.append((load, seconds, count - 1))
        taken = device.free_at - max(step.submitted, core._ended)
        lessons.insert(0, (core._work_of(step.batch), taken, 1))
    for lesson in lessons:
        before = device.lessons[-1] if device.lessons else None
        if before is not None and before[0].rows == lesson[0].rows == lesson[0].tokens == before[0].tokens:
            device.lessons[-1] = _together(before, lesson)
        else:
            device.lessons.append(lesson)


def _together(one: Lesson, other: Lesson) -> Lesson:
    """Return the mean of steps that decode the same rows."""
    count = one[2] + other[2]
    keys = (one[0].keys * one[2] + other[0].keys * other[2]) // count
    return one[0]._replace(keys=keys), (one[1] * one[2] + other[1] * other[2]) / count, count


def learn(core: EngineCore, device: VirtualDevice) -> None:
    """Let the engine learn from the steps of leaps, like ones together: to be called before its next step."""
    for load, seconds, count in device.lessons:
        core.scheduler.times.learn(load, seconds, count)
    device.lessons.clear()


def _line(rows: int, keys: int, count: int, seconds: DecodeSeconds) -> tuple[float, float | None]:
    """Return the seconds of the first of ``count`` steps of the same rows, and by how much longer each is than the one
    before; None if their times are not on a line. The cost model's are concave in keys (windows of attention) or
    convex (a slower link), so a step in the middle that is on the chord shows that all are.

    Args:
        keys: positions that the first step reads.
    """

    def at(place: int) -> float:
        return seconds(StepLoad(rows, keys + place * rows, 0, rows, 0, rows))

    first = at(0)
    if count < 4:
        return first, None if count > 1 else 0.0
    more = (at(count - 1) - first) / (count - 1)
    middle = count // 2
    return first, more if abs(first + middle * more - at(middle)) < STRAIGHT * first else None


def _advance(
    core: EngineCore, device: VirtualDevice, running: list[Sequence], left: list[int], moments: list[float]
) -> list[tuple[Sequence, int]]:
    """Update sequences, blocks and counters by as many steps as there are moments. Returns the sequences with the
    numbers of their tokens that are known now."""
    scheduler, lag, steps = core.scheduler, core.lag, len(moments)
    first, known = scheduler._step, []
    ending: list[tuple[int, int, int, int, int]] = []
    newest: list[Sequence] = []
    _events = _block_events(scheduler, running, left, steps, lag)
    for place, (seq, rows) in enumerate(zip(running, left, strict=True)):
        tokens = min(steps, rows + lag)
        known.append((seq, tokens))
        ends = tokens == rows + lag
        bulk = tokens - ends
        if bulk and not seq.plain:
            _draw(scheduler, device, seq, moments[0])
            bulk -= 1
        seq.output_token_ids.extend(islice(device.outputs[seq.seq_id], bulk))
        scheduler._generation_tokens += bulk
        planned = min(steps, rows)
        seq.length += planned
        seq.scheduled += planned
        seq.last_step += planned if lag else first + planned - seq.last_step
        if ends:
            ending.append((tokens, _COMMITTED, place, _LAST_TOKEN, 0))
        if rows >= steps:
            newest.append(seq)
    scheduler._step += steps
    for call, phase, place, what, computed in sorted(_events + ending):
        seq = running[place]
        if phase == _PLANNED:
            if not scheduler.blocks.grow(seq):
                raise AssertionError("a leap went further than the blocks")
        elif what == _BLOCK:
            scheduler.blocks.register(seq, computed)
        else:
            scheduler.blocks.step_done(first + call - lag)
            _draw(scheduler, device, seq, moments[call - 1])
    scheduler.blocks.step_done(scheduler._step - lag)
    scheduler.budget.decoded(steps)
    scheduler._cut = False
    if not len(scheduler.waiting):
        scheduler.held_back = ""
    again = steps - 1 not in left
    scheduler._last.clear()
    scheduler._last.append(newest)
    if lag:
        _replace_flight(core, device, newest, again)
    return known


def _draw(scheduler: Scheduler, device: VirtualDevice, seq: Sequence, now: float) -> None:
    """Commit one token as the scheduler does: the first of an answer, or the last."""
    scheduler._advance(seq, StepResult({seq.seq_id: next(device.outputs[seq.seq_id])}), now)


def _block_events(
    scheduler: Scheduler, running: list[Sequence], left: list[int], steps: int, lag: int
) -> list[tuple[int, int, int, int, int]]:
    """List the calls in which sequences take blocks, and those after which filled blocks are registered: (call, phase,
    place of the sequence, ``_BLOCK``, computed tokens)."""
    size, caching = scheduler.config.block_size, scheduler.cache.enable_prefix_caching
    events: list[tuple[int, int, int, int, int]] = []
    for place, (seq, rows) in enumerate(zip(running, left, strict=True)):
        needs = len(seq.block_ids) * size + 2 - seq.length
        events += [(call, _PLANNED, place, _BLOCK, 0) for call in range(needs, min(steps, rows) + 1, size)]
        before, tokens = seq.length - lag - 1, min(steps, rows + lag)
        if caching:
            fills = range((seq.num_registered + 1) * size - before, tokens + 1, size)
            calls = dict.fromkeys(max(1, call) for call in fills)
            events += [(call, _COMMITTED, place, _BLOCK, before + call) for call in calls]
        else:
            seq.num_registered = (before + tokens) // size
    return events


def _replace_flight(core: EngineCore, device: VirtualDevice, running: list[Sequence], again: bool) -> None:
    """Replace the step in flight by the last step of the leap."""
    scheduler, step = core.scheduler, core._in_flight[0]
    rows = tuple(
        ScheduledRow(
            seq.seq_id,
            seq.length - 2,
            1,
            seq.prompt_token_ids,
            seq.output_token_ids,
            seq.block_ids,
            seq.draws,
            adapter=seq.adapter,
        )
        for seq in running
    )
    batch = ScheduledBatch(scheduler._step, rows, (), again=again)
    step.batch, step.handle = batch, device.newest(batch)
    step.submitted = device.clock.time
    scheduler._in_flight.clear()
    scheduler._in_flight.append((batch, scheduler._last[-1]))
    count = len(running)
    core._work = batch.step, StepLoad(count, sum(seq.length - 1 for seq in running), 0, count, 0, count)
