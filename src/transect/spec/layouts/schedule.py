"""Pipeline schedules as data: the actions of each stage, in order. Plain arithmetic, no torch.

A schedule is a list of ``Action`` for each rank: the forward or the backward pass of one micro-batch through one of the
rank's runs of layers. It can be printed, simulated, and run (``pipeline.py``); all three read the same list.

* ``gpipe``: all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965). Every micro-batch's
  activations are kept at once.
* ``1f1b``: after a few forward passes one backward pass for each forward pass (Narayanan et al. 2019, PipeDream-Flush).
  The bubbles are those of gpipe; a stage keeps the activations of at most as many micro-batches as stages follow it.
* ``interleaved``: each rank has several runs of layers, ``chunks``, so that a micro-batch passes it that often and a
  bubble is as many times shorter (Narayanan et al. 2021, arXiv:2104.04473).

The bubble is the part of the time in which a rank waits: (p - 1) / (m + p - 1) for p stages and m micro-batches, with v
chunks (p - 1) / (v m + p - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Name = Literal["gpipe", "1f1b", "interleaved"]
NAMES: tuple[Name, ...] = ("gpipe", "1f1b", "interleaved")


class Action(NamedTuple):
    """``kind`` F or B, forward or backward: of a micro-batch, through one of the rank's runs of layers."""

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + "abcdefghijklmnopqrstuvwxyz"[self.chunk] * (self.chunk > 0)


Schedule = list[list[Action]]


def check(name: Name, stages: int, micro_batches: int, chunks: int = 1) -> None:
    """Check that there is such a schedule, with the arguments and the error of ``schedule``."""
    if name not in NAMES:
        raise ValueError(f"schedule is one of {', '.join(NAMES)}, not {name!r}")
    if stages < 1 or micro_batches < 1 or chunks < 1:
        raise ValueError("stages, micro-batches and chunks must be at least 1")
    if name != "interleaved" and chunks > 1:
        raise ValueError(f'{chunks} runs of layers to a rank are for schedule = "interleaved", not {name!r}')
    if name != "interleaved":
        return
    if chunks == 1:
        raise ValueError('schedule = "interleaved" needs 2 runs of layers to a rank or more')
    if micro_batches % stages:
        raise ValueError(
            f'schedule = "interleaved" needs a multiple of {stages} micro-batches on {stages} stages, not '
            f"{micro_batches}: take {-(-micro_batches // stages) * stages}"
        )


def schedule(name: Name, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """List the actions of each of ``stages`` ranks.

    Args:
        chunks: runs of layers of each rank; more than 1 for ``interleaved`` alone.

    Raises:
        ValueError: there is no such schedule; the message names the nearest numbers that work.
    """
    check(name, stages, micro_batches, chunks)
    if name != "interleaved":
        make = _gpipe if name == "gpipe" else _one_forward_one_backward
        return [make(rank, stages, micro_batches) for rank in range(stages)]
    return [_interleaved(rank, stages, micro_batches, chunks) for rank in range(stages)]


def _gpipe(rank: int, stages: int, micro_batches: int) -> list[Action]:
    return [*(Action("F", i) for i in range(micro_batches)), *(Action("B", i) for i in range(micro_batches))]


def _one_forward_one_backward(rank: int, stages: int, micro_batches: int) -> list[Action]:
    forward = [Action("F", i) for i in range(micro_batches)]
    ahead = _ahead("1f1b", rank, stages, micro_batches, 1)
    return _alternating(forward, [Action("B", i) for i in range(micro_batches)], ahead)


def _interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """List the actions of an interleaved schedule: groups of as many micro-batches as stages go through the first
    chunk, then through the next one."""
    forward, backward = [], []
    for number in range(micro_batches * chunks):
        group, place = divmod(number, stages * chunks)
        chunk, within = divmod(place, stages)
        forward.append(Action("F", group * stages + within, chunk))
        backward.append(Action("B", group * stages + within, chunks - 1 - chunk))
    return _alternating(forward, backward, _ahead("interleaved", rank, stages, micro_batches, chunks))


def _ahead(name: Name, rank: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Count the forward passes of a rank before forward and backward passes alternate."""
    if name == "gpipe" or (name == "interleaved" and micro_batches == stages):
        return micro_batches * chunks
    return stages - rank - 1 if name == "1f1b" else 2 * (stages - rank - 1) + (chunks - 1) * stages


def most_kept(name: Name, rank: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Count the most activations that a rank keeps at a time, each of a micro-batch in a run of layers: as
    ``Timeline.kept``, without the timeline."""
    return min(_ahead(name, rank, stages, micro_batches, chunks) + 1, micro_batches * chunks)


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """List ``ahead`` forward passes, then alternate one of each, then list the remaining backward passes."""
    ahead = min(ahead, len(forward))
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += [one, other]
    return found + backward[len(forward) - ahead :]


@dataclass(frozen=True, slots=True)
class Timeline:
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


def simulate(actions: Schedule, forward: float = 1.0, backward: float = 2.0, link: float = 0.0) -> Timeline:
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
    return Timeline(spans, max(clock))


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


def drawn(timeline: Timeline, width: int = 110) -> Sequence[str]:
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
