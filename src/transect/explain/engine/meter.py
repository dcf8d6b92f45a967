"""Cut the life of a request into named pieces, step by step: the arithmetic of ``bill.py``, for logs that grow too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...engine.scheduling.decisions import Added
from .log import LoggedStep, StepRow
from .work import StepWork

PARTS: Mapping[str, str] = {
    "intake": "on its way into the engine",
    "earlier": "in an earlier engine, whose log is not there, and on its way from it",
    "hand-over": "its engine ended: until another one had taken it",
    "grammar": "its grammar was being compiled",
    "queue: places": "queue: max_num_seqs sequences ran",
    "queue: kv": "queue: too few free KV blocks",
    "queue: adapters": "queue: max_loras other adapters ran",
    "queue: budget": "queue: the step was full of tokens",
    "queue: batch": "queue: the static batch ran",
    "queue: flight": "queue: the step under way had to end first",
    "starved": "admitted, but a step had no room for it",
    "preempted": "preempted; waited to start again",
    "recompute": "recomputed tokens after preemption",
    "ranks": "moving numbers between ranks in its steps, and waiting for the last of them",
    "others": "tokens of others in its steps",
    "compute": "its own tokens",
    "host": "between steps",
}
"""Names of parts with their meanings, in their fixed order."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's life in seconds: its parts, their floor, and their sum."""

    seconds: float
    parts: Mapping[str, float]
    floor: float
    """Least time for the span's own tokens alone; 0 if device or model is unknown."""
    tokens: int

    def to_dict(self) -> dict[str, object]:
        """Return the span for JSON; times in milliseconds, ``floor_ms`` None if it is unknown."""
        return {
            "ms": 1e3 * self.seconds,
            "parts_ms": {part: 1e3 * value for part, value in self.parts.items()},
            "floor_ms": 1e3 * self.floor or None,
            "tokens": self.tokens,
        }


class Meter:
    """Pieces of the life of one choice, in order and without holes.

    ``begin`` opens its stay in an engine. ``take`` then gets the steps of that engine that were planned since and are
    done, in their order.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[float, float, str]] = []
        """(begin, end, part), without holes."""
        self.floors: list[tuple[float, float, int]] = []
        """(end of the step, floor of the request's row, tokens of the row)."""
        self._reached = 0
        """Positions that have been computed."""
        self._at = 0.0
        self._name = ""
        """Part to which the time since ``_at`` belongs, before the first step of the request."""
        self._expected = -1
        """Position at which its next row starts, unless it is preempted; -1 before the first row."""
        self._between: list[LoggedStep] = []
        """Steps without it since its last row."""

    def begin(self, added: Added, first: bool = True) -> None:
        """Begin the request's time in an engine; ``first``: no engine with a log had the request before."""
        way = "grammar" if added.grammar else "intake"
        if added.known is not None:
            way = "earlier" if first else "hand-over"
        self._piece(added.arrival, added.at, way)
        self._at, self._name, self._expected = added.at, "queue: flight", -1
        self._between.clear()

    def take(self, step: LoggedStep, row: StepRow | None, work: StepWork) -> None:
        """Name the time up to a step and, if ``row`` is the request's row in it, the time of the step."""
        if row is None:
            if self._expected >= 0:
                self._between.append(step)
            elif step.planned.at > self._at:  # each decision gives a reason for the time up to the next one
                self._piece(self._at, step.planned.at, self._name)
                self._at, self._name = step.planned.at, f"queue: {step.planned.held_back or 'flight'}"
            return
        assert step.at is not None
        if self._expected < 0:
            self._piece(self._at, step.begins, self._name)
        else:
            self._pass("preempted" if row[1] != self._expected else "starved", step.begins)
        begins = step.begins + min(step.ranks, step.seconds)
        self._piece(step.begins, begins, "ranks")
        mine = work.share([row], step.rows) * (step.at - begins)
        end = step.end(row)
        anew = max(0, min(self._reached, end) - row[1]) / row[2]
        middle = step.at - mine
        self._piece(begins, middle, "others")
        self._piece(middle, middle + mine * anew, "recompute")
        self._piece(middle + mine * anew, step.at, "compute")
        self.floors.append((step.at, work.floor([row]).seconds, row[2]))
        self._at, self._expected = step.at, end
        self._reached = max(self._reached, end)

    def span(self, begin: float, end: float) -> Span:
        """Return the pieces between two moments."""
        parts = dict.fromkeys(PARTS, 0.0)
        for first, last, name in self.pieces:
            parts[name] += max(0.0, min(last, end) - max(first, begin))
        floor = sum(seconds for at, seconds, _ in self.floors if begin < at <= end)
        tokens = sum(count for at, _, count in self.floors if begin < at <= end)
        return Span(end - begin, {name: value for name, value in parts.items() if value}, floor, tokens)

    def _pass(self, name: str, until: float) -> None:
        """Name the time between two of the request's steps, in which other steps ran, or none."""
        for step in self._between:
            self._piece(self._at, step.begins, "host" if name == "starved" else name)
            self._piece(step.begins, step.at or step.begins, name)
            self._at = max(self._at, step.at or step.begins)
        self._piece(self._at, until, "host" if name == "starved" else name)
        self._between.clear()

    def _piece(self, begin: float, end: float, name: str) -> None:
        if self.pieces:
            begin = max(begin, self.pieces[-1][1])
        if end > begin:
            self.pieces.append((begin, end, name))
