"""The queue of sequences that wait for KV blocks and a place: its order and its bound."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from .policies.admission import LEAST_RETRY_S, MOST_RETRY_S, Admission, Claim, Ledger
from .policies.order import Key
from .request import Rank, Sequence, Status

_SMOOTHING = 0.2
_by_rank = attrgetter("rank")


class WaitingQueue:
    """Sequences in the order of their ranks: new requests (by their leaders) and preempted ones.

    Args:
        admission: bounds on the new requests; None for none. Preempted sequences always come back.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = admission or Admission()
        self.elsewhere = Ledger()
        """Admitted requests that wait for something else, such as a grammar, before they join this queue."""
        self.let_in: set[str] = set()
        """Ids of requests of ``elsewhere`` that join the queue now."""
        self._last_admission: float | None = None
        self._interval: float | None = None
        self.changes = 0
        """Number of changes so far."""
        self.reset()

    def reset(self) -> None:
        """Remove all waiting sequences."""
        self.changes += 1
        self.num_preempted = 0
        self.num_tokens = 0
        """Tokens to be computed of all waiting sequences."""
        self.num_felt = 0
        """Tokens to be computed, without requests that are answered in one piece."""
        self.new = Ledger()
        """Requests that wait for their first step."""
        self._sequences: list[Sequence] = []
        """Waiting sequences in the order of their ranks, which are unique."""

    @property
    def num_new(self) -> int:
        """Requests that wait for their first step."""
        return self.new.requests

    def check_room(self, claim: Claim, key: Key) -> None:
        """Raise QueueFull if the queue cannot take another new request.

        Args:
            key: its place in the order.
        """
        if self.elsewhere.requests:
            both = Ledger(*(getattr(self.new, n) + getattr(self.elsewhere, n) for n in ("requests", "nbytes", "work")))
            for ledger in (self.new, self.elsewhere):
                for client, counts in ledger.by_client.items():
                    both.by_client[client] = [a + b for a, b in zip(both.by_client[client], counts, strict=True)]
        else:
            both = self.new
        place = bisect_left(self._sequences, key, key=lambda seq: seq.rank[:3])
        ahead = place / len(self._sequences) if self._sequences else 0.0
        self.admission.check(claim, both, ahead, self.retry_after())

    def retry_after(self) -> float:
        """Estimate the seconds, 1 to 60, in which half of the queue gets its turn, from the smoothed time between
        admissions while others waited."""
        if self._interval is None:
            return LEAST_RETRY_S
        return min(max(self._interval * self.num_new / 2, LEAST_RETRY_S), MOST_RETRY_S)

    def push(self, seq: Sequence) -> None:
        """Queue a new request's leader or a preempted sequence."""
        seq.status = Status.WAITING
        self._count(seq, 1)
        insort(self._sequences, seq, key=_by_rank)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in the order of their turns; the queue must not change meanwhile."""
        return iter(self._sequences)

    def in_order(self) -> list[Sequence]:
        """Return all waiting sequences, in the order of their turns."""
        return list(self._sequences)

    def head(self) -> Sequence | None:
        """Return the sequence whose turn is next."""
        return self._sequences[0] if self._sequences else None

    def admit(self, seq: Sequence, now: float) -> None:
        """Remove a sequence, usually the head, because it is admitted at time ``now`` (seconds)."""
        self._take_out(seq)
        if seq.request.first_scheduled is None:
            if self._last_admission is not None:
                interval = now - self._last_admission
                old = interval if self._interval is None else self._interval
                self._interval = old + _SMOOTHING * (interval - old)
            self._last_admission = now if self.num_new else None
            self.admission.pace.left(seq.request.claim.work, now, self.num_new > 0)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence, and all that is counted for it."""
        self._take_out(seq)
        seq.status = Status.GONE

    def move(self, seq: Sequence, rank: Rank) -> None:
        """Change the rank of a waiting sequence."""
        self._take_out(seq)
        seq.rank = rank
        self.push(seq)

    def grew(self, seq: Sequence, tokens: int) -> None:
        """Count additional tokens of a sequence, which may wait if it was preempted while its step was in flight."""
        if seq.status is Status.WAITING:
            self.changes += 1
            self.num_tokens += tokens
            self.num_felt += 0 if seq.request.spec.in_one_piece else tokens

    def _take_out(self, seq: Sequence) -> None:
        index = bisect_left(self._sequences, seq.rank, key=_by_rank)
        assert self._sequences[index] is seq, f"{seq} is not waiting"
        del self._sequences[index]
        self._count(seq, -1)

    def _count(self, seq: Sequence, change: int) -> None:
        self.changes += 1
        self.num_tokens += change * seq.to_compute
        self.num_felt += 0 if seq.request.spec.in_one_piece else change * seq.to_compute
        if seq.request.first_scheduled is None:
            self.new.add(seq.request.claim, change)
        else:
            self.num_preempted += change
