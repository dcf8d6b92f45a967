"""The queue of sequences that wait for KV blocks and a place: its order, and its bound."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from .request import Sequence, Status

_SMOOTHING = 0.2
_MIN_RETRY, _MAX_RETRY = 1.0, 60.0
_by_rank = attrgetter("rank")


class QueueFull(RuntimeError):
    """The queue has no place for another request. ``retry_after``: seconds after which another try may succeed."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests wait already, the most that max_queue allows; try again in {retry_after:.0f} s"
        )
        self.waiting = waiting
        self.retry_after = retry_after


class WaitingQueue:
    """Sequences in the order of their ranks: new requests (by their leaders) and preempted ones.

    Args:
        max_new: bound on the new requests, None for none. Preempted sequences always come back.
    """

    def __init__(self, max_new: int | None = None) -> None:
        self.max_new = max_new
        self.num_promised = 0
        """New requests that will come and have been given a place (``GrammarQueue``)."""
        self._last_admission: float | None = None
        self._interval: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all that wait."""
        self.num_new = 0
        self.num_preempted = 0
        self.num_tokens = 0
        """To be computed of all that wait."""
        self._sequences: list[Sequence] = []
        """In the order of their ranks, each of which is one sequence's alone."""

    def check_room(self) -> None:
        """Raises QueueFull when another new request would be one too many."""
        if self.max_new is not None and self.num_new + self.num_promised >= self.max_new:
            raise QueueFull(self.num_new + self.num_promised, self.retry_after())

    def retry_after(self) -> float:
        """Seconds, 1 to 60: an estimate of the time in which half of the queue gets its turn, from the smoothed time
        between admissions while others waited."""
        if self._interval is None:
            return _MIN_RETRY
        return min(max(self._interval * self.num_new / 2, _MIN_RETRY), _MAX_RETRY)

    def push(self, seq: Sequence) -> None:
        """Queue a new request's leader or a preempted sequence."""
        seq.status = Status.WAITING
        self._count(seq, 1)
        insort(self._sequences, seq, key=_by_rank)

    def __len__(self) -> int:
        return len(self._sequences)

    def in_order(self) -> list[Sequence]:
        """All that wait, in the order of their turns."""
        return list(self._sequences)

    def head(self) -> Sequence | None:
        """The sequence whose turn is next."""
        return self._sequences[0] if self._sequences else None

    def admit(self, seq: Sequence, now: float) -> None:
        """Take a sequence out, the head as a rule, because it is admitted at time ``now`` (seconds)."""
        self._take_out(seq)
        if seq.request.first_scheduled is None:
            if self._last_admission is not None:
                interval = now - self._last_admission
                old = interval if self._interval is None else self._interval
                self._interval = old + _SMOOTHING * (interval - old)
            self._last_admission = now if self.num_new else None

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out for good; nothing of it stays here."""
        self._take_out(seq)
        seq.status = Status.GONE

    def grew(self, seq: Sequence, tokens: int) -> None:
        """Count more tokens of a sequence, which may wait if it was preempted while its step was in flight."""
        if seq.status is Status.WAITING:
            self.num_tokens += tokens

    def _take_out(self, seq: Sequence) -> None:
        index = bisect_left(self._sequences, seq.rank, key=_by_rank)
        assert self._sequences[index] is seq, f"{seq} does not wait"
        del self._sequences[index]
        self._count(seq, -1)

    def _count(self, seq: Sequence, change: int) -> None:
        self.num_tokens += change * seq.to_compute
        if seq.request.first_scheduled is None:
            self.num_new += change
        else:
            self.num_preempted += change
