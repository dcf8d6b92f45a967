"""Many decode steps at once, in a simulation. While the same sequences decode and none waits, comes or ends, each step
is like the one before. ``leap`` brings an engine into the state in which that many calls of ``EngineCore.step`` would
have left the engine. Blocks are taken and registered in the order of those steps, so the prefix cache forgets the same
ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from ...costs.steps import StepLoad
from .batch import ScheduledBatch
from .request import Sequence

if TYPE_CHECKING:
    from .core import EngineCore
    from .scheduler import Scheduler
    from .virtual_device import VirtualDevice

DecodeSeconds = Callable[[StepLoad], float]
"""Seconds of a step that only decodes."""

FEWEST = 3
"""Fewest steps at which a leap is faster than single steps."""
MOST = 4096
LEARN_EVERY = 64
"""Interval at which the engine learns from a leap's steps: on a virtual device all follow one law."""
_PLANNED, _COMMITTED = 0, 1


def leap(core: EngineCore, device: VirtualDevice, until: float, seconds: DecodeSeconds) -> list[float]:
    """Advance ``core`` by the steps that are certainly alike and end by ``until``.

    Returns the moments at which the tokens of these steps were known, for every running sequence; empty if there is
    nothing to leap over.
    """
    scheduler, lag = core.scheduler, core.lag
    running = scheduler.running
    if scheduler.speculation is not None or not running or len(scheduler.waiting):
        return []
    if len(core._in_flight) != lag or core._ready:
        return []
    if lag and not (core._in_flight[0].batch.again and scheduler._last[-1] == running):
        return []
    if scheduler.arrivals.order.shared and scheduler.budget.rows(running, scheduler.waiting).seconds < math.inf:
        return []  # clients with more rows than others may have to take turns
    if scheduler.blocks.returns_pending or device.clock.time >= until:
        return []
    most = min(seq.max_length - seq.length for seq in running) - 2
    if most < FEWEST or not all(map(_decodes, running)):
        return []
    steps = min(most, MOST, _room(scheduler, running, most))
    moments = _moments(core, device, _load(running), steps, until, seconds) if steps >= FEWEST else []
    if moments:
        _advance(core, device, len(moments))
    return moments


def _decodes(seq: Sequence) -> bool:
    return seq.plain and seq.shared_block is None and seq.length - seq.scheduled == 1


def _load(running: list[Sequence]) -> StepLoad:
    """Count the work of the step that would be planned next."""
    rows = len(running)
    return StepLoad(rows, sum(seq.length for seq in running), 0, rows, 0, rows)


def _room(scheduler: Scheduler, running: list[Sequence], most: int) -> int:
    """Count the steps that are certain to find blocks, up to ``most``."""
    size, free = scheduler.config.block_size, scheduler.cache.num_free
    needed = sum(-(-(seq.length + most - 1) // size) - len(seq.block_ids) for seq in running)
    return most if needed <= free else free // len(running) * size


def _moments(
    core: EngineCore,
    device: VirtualDevice,
    load: StepLoad,
    most: int,
    until: float,
    seconds: DecodeSeconds,
) -> list[float]:
    """Let the device take up to ``most`` steps, and the engine learn from some. Returns the ends of the steps, or with
    a lag those of the steps before each."""
    host, lag, rows = device.host, core.lag, load.rows
    found: list[float] = []
    end = device.free_at if lag else device.clock.time
    while len(found) < most and end < until:
        taken = seconds(load)
        if lag and taken <= host:  # the host is what it waits for
            break
        if core._timed and not len(found) % LEARN_EVERY:
            core.scheduler.times.learn(load, taken if lag else taken + host)
        before, end = end, end + taken + (0.0 if lag else host)
        found.append(before if lag else end)
        device.busy += taken
        load = StepLoad(rows, load.keys + rows, 0, rows, 0, rows)
    if found:
        device.steps += len(found)
        device.free_at = end
        device.clock.advance(max(0.0, found[-1] - device.clock.time))
        core._ended = found[-1]
    return found


def _advance(core: EngineCore, device: VirtualDevice, steps: int) -> None:
    """Update sequences, blocks and counters by ``steps`` steps."""
    scheduler, lag = core.scheduler, core.lag
    running = scheduler.running
    for seq in running:
        seq.output_token_ids.extend(islice(device.outputs[seq.seq_id], steps))
    _take_blocks(scheduler, running, steps, lag)
    for seq in running:
        seq.length += steps
        seq.scheduled += steps
        seq.last_step = scheduler._step + steps
    scheduler._step += steps
    scheduler._generation_tokens += steps * len(running)
    scheduler.blocks.step_done(scheduler._step - lag)
    for _ in range(steps):
        scheduler.budget.planned(prompts=False)
    scheduler._cut, scheduler.held_back = False, ""
    scheduler._last.clear()
    scheduler._last.append(list(running))
    if lag:
        _replace_flight(core, device)


def _take_blocks(scheduler: Scheduler, running: list[Sequence], steps: int, lag: int) -> None:
    """Take the blocks of the next ``steps`` steps, and register the blocks that they fill, in the order of the
    steps."""
    size, blocks = scheduler.config.block_size, scheduler.blocks
    events: list[tuple[int, int, int]] = []
    for place, seq in enumerate(running):
        needs = len(seq.block_ids) * size + 2 - seq.length
        events += [(step, _PLANNED, place) for step in range(needs, steps + 1, size)]
        fills = (seq.num_registered + 1) * size - seq.length + lag + 1
        events += [(step, _COMMITTED, place) for step in range(fills, steps + 1, size)]
    events.sort()
    for step, kind, place in events:
        seq = running[place]
        if kind == _COMMITTED:
            blocks.register(seq, seq.length - lag + step - 1)
        elif not blocks.grow(seq):
            raise AssertionError("a leap went further than the blocks")


def _replace_flight(core: EngineCore, device: VirtualDevice) -> None:
    """Replace the step in flight by the last step of the leap."""
    scheduler, step = core.scheduler, core._in_flight[0]
    running = scheduler.running
    rows = tuple(
        msgspec.structs.replace(row, start=seq.length - 2, block_ids=seq.block_ids)
        for row, seq in zip(step.batch.rows, running, strict=True)
    )
    batch = ScheduledBatch(scheduler._step, rows, (), again=True)
    step.batch, step.handle = batch, device.newest(batch)
    step.submitted = device.clock.time
    scheduler._in_flight.clear()
    scheduler._in_flight.append((batch, scheduler._last[-1]))
    core._work = batch.step, _load(running)._replace(keys=sum(row.end for row in rows))
