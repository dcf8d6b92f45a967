"""Pipeline schedules as data: the actions of each stage, in order. Plain arithmetic, no torch.

A schedule is a list of ``Action`` for each rank: the forward or the backward pass of one micro-batch through one of the
rank's runs of layers. It can be printed, simulated, and run (``parallel/pipeline.py``); all three read the same list.

``schedules/`` has the kinds of schedules, one file each.

The bubble is the part of the time in which a rank waits: (p - 1) / (m + p - 1) for p stages and m micro-batches, with v
chunks (p - 1) / (v m + p - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .schedules.registry import schedule_kind, schedules


class Action(NamedTuple):
    """``kind`` F or B, forward or backward: of a micro-batch, through one of the rank's runs of layers."""

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + "abcdefghijklmnopqrstuvwxyz"[self.chunk] * (self.chunk > 0)


Schedule = list[list[Action]]


def check(name: str, stages: int, micro_batches: int, chunks: int = 1) -> None:
    """Check that there is such a schedule, with the arguments and the error of ``schedule``."""
    kind = schedule_kind(name)
    if stages < 1 or micro_batches < 1 or chunks < 1:
        raise ValueError("stages, micro-batches and chunks must be at least 1")
    if not kind.chunked and chunks > 1:
        several = ", ".join(f'"{each.name}"' for each in schedules().values() if each.chunked)
        raise ValueError(f"{chunks} runs of layers to a rank are for schedule = {several}, not {name!r}")
    if not kind.chunked:
        return
    if chunks == 1:
        raise ValueError(f'schedule = "{name}" needs 2 runs of layers to a rank or more')
    if micro_batches % stages:
        raise ValueError(
            f'schedule = "{name}" needs a multiple of {stages} micro-batches on {stages} stages, not '
            f"{micro_batches}: take {-(-micro_batches // stages) * stages}"
        )


def schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """List the actions of each of ``stages`` ranks.

    Args:
        name: one of ``schedules()``.
        chunks: runs of layers of each rank; more than 1 for ``interleaved`` and its like alone.

    Raises:
        ValueError: there is no such schedule; the message names the nearest numbers that work.
    """
    check(name, stages, micro_batches, chunks)
    forward, backward = [], []
    for number in range(micro_batches * chunks):  # groups of as many micro-batches as stages go through each chunk
        group, place = divmod(number, stages * chunks)
        chunk, within = divmod(place, stages)
        forward.append(Action("F", group * stages + within, chunk))
        backward.append(Action("B", group * stages + within, chunks - 1 - chunk))
    ahead = schedule_kind(name).ahead
    return [_alternating(forward, backward, ahead(rank, stages, micro_batches, chunks)) for rank in range(stages)]


def most_kept(name: str, rank: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Count the most activations that a rank keeps at a time, each of a micro-batch in a run of layers: as
    ``ScheduleTimeline.kept``, without the timeline."""
    return min(schedule_kind(name).ahead(rank, stages, micro_batches, chunks) + 1, micro_batches * chunks)


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """List ``ahead`` forward passes, then alternate one of each, then list the remaining backward passes."""
    ahead = min(ahead, len(forward))
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += [one, other]
    return found + backward[len(forward) - ahead :]


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """The actions of each rank in time.

    Attributes:
        spans: for each rank (action, begin, end), in order.
        length: until all are done.
    """

    spans: list[list[tuple[Action, float, float]]]
    length: float

    @property
    def bubbles(self) -> list[float]:
        """Share of the time in which each rank waits."""
        return [1 - sum(end - begin for _, begin, end in rank) / self.length for rank in self.spans]

    def to_dict(self) -> dict[str, Any]:
        """Return length, shares of waiting, kept activations and actions with their times, for JSON."""
        actions = [[[str(action), begin, end] for action, begin, end in rank] for rank in self.spans]
        return {"length": self.length, "bubbles": self.bubbles, "kept": self.kept, "actions": actions}

    @property
    def kept(self) -> list[int]:
        """Most activations that each rank keeps at once, each of a micro-batch in a run of layers."""
        most = []
        for rank in self.spans:
            now = high = 0
            for action, _, _ in rank:
                now += 1 if action.kind == "F" else -1
                high = max(high, now)
            most.append(high)
        return most


def simulate(actions: Schedule, forward: float = 1.0, backward: float = 2.0, link: float = 0.0) -> ScheduleTimeline:
    """Run a schedule on a virtual clock.

    Args:
        forward, backward: time of a pass through one run of layers. link: time to send its result.

    Raises:
        ValueError: a rank waits for what will never come; the message names it.
    """
    stages = len(actions)
    chunks = 1 + max(action.chunk for rank in actions for action in rank)
    ends: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in actions]
    clock = [0.0] * stages
    while any(len(done) < len(todo) for done, todo in zip(spans, actions, strict=True)):
        moved = False
        for rank, todo in enumerate(actions):
            while len(spans[rank]) < len(todo):
                action = todo[len(spans[rank])]
                ready = _ready(action, action.chunk * stages + rank, stages * chunks, ends, link)
                if ready is None:
                    break
                begin = max(clock[rank], ready)
                clock[rank] = begin + (forward if action.kind == "F" else backward)
                ends[action.kind, action.micro_batch, action.chunk * stages + rank] = clock[rank]
                spans[rank].append((action, begin, clock[rank]))
                moved = True
        if not moved:
            stuck = next(rank for rank, todo in enumerate(actions) if len(spans[rank]) < len(todo))
            raise ValueError(f"rank {stuck} waits for ever with {actions[stuck][len(spans[stuck])]}")
    return ScheduleTimeline(spans, max(clock))


def _ready(
    action: Action, place: int, places: int, ends: dict[tuple[str, int, int], float], link: float
) -> float | None:
    """Return the time at which the inputs of an action arrive, None if not yet known. ``place`` of ``places`` runs of
    layers."""
    if action.kind == "F":
        return 0.0 if place == 0 else _later(ends.get(("F", action.micro_batch, place - 1)), link)
    own = ends.get(("F", action.micro_batch, place))
    if own is None or place == places - 1:
        return own
    below = _later(ends.get(("B", action.micro_batch, place + 1)), link)
    return None if below is None else max(own, below)


def _later(time: float | None, by: float) -> float | None:
    return None if time is None else time + by


def drawn(timeline: ScheduleTimeline, width: int = 110) -> Sequence[str]:
    """Draw a line for each rank: its actions over time, with dots while it waits."""
    unit = min(end - begin for rank in timeline.spans for _, begin, end in rank)
    cell = max(len(str(action)) for rank in timeline.spans for action, _, _ in rank) + 1
    lines = []
    for rank in timeline.spans:
        line, at = "", 0.0
        for action, begin, end in rank:
            line += "." * round((begin - at) / unit * cell)
            line += str(action).ljust(round((end - begin) / unit * cell))
            at = end
        lines.append(line if len(line) <= width else line[: width - 3] + "...")
    return lines
