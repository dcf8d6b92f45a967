"""A decision log after reading: steps with their rows and times, requests with their lives (no torch).

The engine writes events (``engine/scheduling/decisions.py``). Here they become ``LoggedStep`` and ``Life`` objects, and
the events stay beside them in their order, for a replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.scheduling.decisions import Aborted, Added, Done, Header, Planned, Record, TakenBack, read_records

StepRow = tuple[int, int, int]
"""Sequence number, first position, tokens."""
LATE_S = 5e-5
"""Seconds: a step had ended before its result was requested, if the result took no longer than this."""
SLOW = 10
"""A step had also ended before, if launching the next step took this many times as long as the wait for its result."""
DRAWS_S = 5e-4
"""Longest remaining time of a step, in seconds, when only its draws were left."""


@dataclass(slots=True)
class LoggedStep:
    """One engine step. Times are seconds on the engine's clock; ``at`` is None if the log ends before the step's
    result."""

    number: int
    rows: list[StepRow]
    planned: Planned
    at: float | None = None
    begins: float = 0.0
    """Start of the step: it was submitted and the previous step was done."""
    waited: float = 0.0
    committed: float = 0.0
    launched: str = ""
    drawn: float = 0.0
    ranks: float = 0.0
    ahead: bool = False
    """True if steps are planned while the previous one runs."""
    handed: float = 0.0
    """Seconds of submitting the next step, if that was planned while this one ran."""
    accepted: dict[int, int] = field(default_factory=dict)
    """Accepted drafts of each row with drafts, by sequence number; such a row has one token that is not a draft."""

    def drafted(self, row: StepRow) -> int:
        """Return the number of drafts of a row."""
        return row[2] - 1 if row[0] in self.accepted else 0

    def end(self, row: StepRow) -> int:
        """Return the position after a row's last token that stays: rejected drafts do not."""
        return row[1] + row[2] - self.drafted(row) + self.accepted.get(row[0], 0)

    @property
    def seconds(self) -> float:
        """Seconds from ``begins`` to ``at``."""
        return (self.at or self.begins) - self.begins

    @property
    def late(self) -> str:
        """Cause that kept the device waiting at the end of this step; empty for none.

        ``host``: the step had ended before the next step was launched; ``grammar``: only draws that waited for masks
        were left; ``ranks``: communication between ranks took more than half of the step.
        """
        if self.at is None:
            return ""
        if self.ranks > 0.5 * self.seconds:
            return "ranks"
        if self.ahead and self.drawn > self.begins and self.at - self.drawn < min(DRAWS_S, 0.1 * self.seconds):
            return "grammar"
        wait = self.at - self.waited
        return "host" if self.ahead and (wait < LATE_S or SLOW * wait < self.handed) else ""

    @property
    def tokens(self) -> int:
        """Tokens that it computes."""
        return sum(row[2] for row in self.rows)


@dataclass(slots=True)
class Life:
    """One request in the log."""

    added: Added
    ends: dict[int, tuple[str, int, bytes]] = field(default_factory=dict)
    """Finish reason, output tokens and hashes of the full blocks, by choice."""
    steps: list[tuple[int, StepRow]] = field(default_factory=list)
    """(index into ``DecisionRunLog.steps``, row) of every row of its choices."""


@dataclass(slots=True)
class DecisionRunLog:
    """A whole log, or as much of it as there is.

    Attributes:
        events: all records after the header, in their order.
        steps: those that were planned, in their order.
        requests: by id, in the order of their arrival at the scheduler. An id that was used again has its last life.
        complete: True if the log begins with the start of the engine.
        idle: seconds since the newest record, where a running server gave the log.
        name: of the engine, where it is a replica of a fleet.
    """

    header: Header
    events: list[Record]
    steps: list[LoggedStep]
    requests: dict[str, Life]
    lives: list[Life]
    complete: bool
    idle: float = 0.0
    name: str = ""

    @property
    def newest(self) -> float:
        """Time of the newest record, on the engine's clock."""
        last = self.events[-1] if self.events else None
        return last.committed if isinstance(last, Done) else getattr(last, "at", 0.0) or self._last_step()

    def _last_step(self) -> float:
        return max((step.at or step.planned.at for step in self.steps[-2:]), default=self.header.began)

    def has(self, name: str) -> bool:
        """Return True if there is a request called ``name``."""
        try:
            return bool(self.life(name))
        except ValueError:
            return False

    def life(self, name: str) -> Life:
        """Return the request called ``name``: the engine's id, or the id in a server's answer (``chatcmpl-...``).

        Raises:
            ValueError: there is none, or more than one.
        """
        bare = bare_id(name)
        found = [key for key in self.requests if key in (name, bare) or key.startswith(f"{bare}-")]
        if not found:
            raise ValueError(f"the log has no request {name!r}: it ended too long ago, or never came")
        if len(found) > 1 and name not in found:
            raise ValueError(f"{name!r} is several requests ({', '.join(found[:5])}): give one of these")
        return self.requests[name if name in found else found[0]]


def bare_id(name: str) -> str:
    """Return the engine's id of a request that a server's answer calls ``chatcmpl-...``, ``resp_...`` and so on; the
    beginning of its ids if one answer is several requests."""
    bare = name.rpartition("-")[2] if name.startswith(("cmpl-", "chatcmpl-", "resp", "msg")) else name
    return bare.removeprefix("resp_").removeprefix("msg_")


def load(path: str | Path) -> DecisionRunLog:
    """Read the log in a file.

    Raises:
        ValueError: there is no such file, or it is not a decision log.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a file that --decision-log wrote") from None
    return build(read_records(data))


def build(records: Iterable[Record], *, complete: bool = True, idle: float = 0.0) -> DecisionRunLog:
    """Build a log from its records, the header first.

    ``complete``: nothing is missing between the header and the first record. Else steps whose rows follow from steps
    that are missing are left out. ``idle``: seconds since the newest record.
    """
    events = list(records)
    header = events.pop(0)
    assert isinstance(header, Header)
    log = DecisionRunLog(header, events, [], {}, [], complete, idle)
    reader = StepReader(header, complete=complete)
    of_seq: dict[int, tuple[Life, int]] = {}
    for event in events:
        if isinstance(event, Added):
            life = Life(event)
            log.requests[event.request_id] = life
            log.lives.append(life)
            for choice in range(event.n):
                of_seq[event.first_seq + choice] = life, choice
        elif isinstance(event, Planned):
            step = reader.planned(event)
            if step is None:
                continue
            index = len(log.steps)
            log.steps.append(step)
            for row in step.rows:
                if row[0] in of_seq:
                    of_seq[row[0]][0].steps.append((index, row))
        elif isinstance(event, Done):
            reader.done(event)
        elif isinstance(event, TakenBack):
            reader.taken_back(event)
        if isinstance(event, (Done, Aborted, TakenBack)):
            for seq, reason, count, digests in event.ended:
                if seq in of_seq:
                    owner, choice = of_seq[seq]
                    owner.ends[choice] = reason, count, digests
    return log


class StepReader:
    """Builds steps from their records, which come in order.

    Args:
        header: of the log.
        complete: nothing is missing between the header and the first record. Else steps whose rows follow from steps
            that are missing are left out.
    """

    def __init__(self, header: Header, *, complete: bool = True) -> None:
        self._ahead = header.lag > 0
        self._last: list[StepRow] | None = [] if complete else None
        self._by_number: dict[int, LoggedStep] = {}
        self._newest: LoggedStep | None = None
        self._done_at = header.began

    def planned(self, event: Planned) -> LoggedStep | None:
        """Begin a step; None if nothing could run, or its rows are not known."""
        if not event.step:
            return None
        self._last = last_rows_on(self._last) if event.rows is None else rows_of(event.rows)
        if self._last is None:
            return None
        step = self._newest = self._by_number[event.step] = LoggedStep(event.step, self._last, event)
        return step

    def done(self, event: Done) -> LoggedStep | None:
        """Complete a step; None if its beginning is not known."""
        found = self._by_number.pop(event.step, None)
        if found is None:
            return None
        found.at, found.waited, found.committed = event.at, event.waited, event.committed
        found.launched, found.drawn, found.ranks = event.launched, event.drawn, event.ranks
        found.accepted = dict(event.accepted)
        found.ahead = self._ahead
        if self._newest is not None and self._newest is not found:
            found.handed = max(0.0, found.waited - self._newest.planned.at)
        found.begins = max(found.planned.at, self._done_at)
        self._done_at = event.at
        return found

    def taken_back(self, event: TakenBack) -> list[LoggedStep]:
        """End all steps in flight; returns them."""
        found = list(self._by_number.values())
        for each in found:
            each.at = each.waited = each.committed = max(event.at, self._done_at)
            each.begins = max(each.planned.at, self._done_at)
            self._done_at = each.at
        self._by_number.clear()
        return found


def rows_of(packed: bytes) -> list[StepRow]:
    """Return the rows of a ``Planned`` record."""
    numbers = array("I")
    numbers.frombytes(packed)
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def last_rows_on(rows: Sequence[StepRow] | None) -> list[StepRow] | None:
    """Return the rows of a step that continues these rows by one token each; None if the rows are unknown."""
    return None if rows is None else [(seq, start + count, 1) for seq, start, count in rows]
