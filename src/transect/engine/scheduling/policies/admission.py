"""Admission of requests to the queue: bounds on its bytes and on the predicted wait.

A request that waits holds memory, and a client that gets its answer after minutes has often gone. Both are bounded; a
number of requests says little of either. What one client may hold is bounded by itself, so that its backlog does not
shut out others. The wait is predicted from the work that goes before a request in the order of the queue, and from the
pace at which work left the queue lately, while others waited. Plain arithmetic; the caller reads the clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

OWN_SHARE = 0.5
"""Share of the queue's bytes that one client may hold."""
MEMORY_S = 10.0
"""Time constant, in seconds, of the decay of older observations of the pace."""
LEAST_SEEN_S = 2.0
"""Seconds of a crowded queue before its pace is known."""
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0

RULES = {
    "admission": {"by": ("Admission.check",), "settings": {"max_queue_bytes": 90_000, "max_queue_wait": 3.0}},
    "pace": {"by": ("Pace.left", "Pace.known"), "settings": {"max_queue_wait": 30.0, "max_num_seqs": 3}},
}


class QueueFull(RuntimeError):
    """A request cannot join the queue now; the same request may be taken later.

    Args:
        waiting: requests that wait.
        retry_after: seconds after which another try may succeed.
        reason: a sentence; None if the number of requests is what is bounded.
        own: the request's client is at a limit of its own, and there is room for others.
    """

    def __init__(self, waiting: int, retry_after: float, reason: str | None = None, own: bool = False) -> None:
        self.reason = reason or f"{waiting} requests wait already, the most that max_queue allows"
        super().__init__(f"{self.reason}; try again in {retry_after:.0f} s")
        self.waiting, self.retry_after, self.own = waiting, retry_after, own


@dataclass(frozen=True, slots=True)
class Claim:
    """A request as admission sees it.

    Attributes:
        nbytes: estimate of the memory that it holds while it waits.
        work: estimate of the tokens that it will compute.
    """

    client: str
    nbytes: int
    work: int


@dataclass(slots=True)
class Ledger:
    """Sums over waiting requests."""

    requests: int = 0
    nbytes: int = 0
    work: int = 0
    by_client: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    """Requests, bytes and work of each client with waiting requests."""

    def add(self, claim: Claim, sign: int = 1) -> None:
        """Add a request; ``sign`` -1 removes it."""
        self.requests += sign
        self.nbytes += sign * claim.nbytes
        self.work += sign * claim.work
        own = self.by_client[claim.client]
        own[0] += sign
        own[1] += sign * claim.nbytes
        own[2] += sign * claim.work
        if not own[0]:
            del self.by_client[claim.client]

    def of(self, client: str) -> tuple[int, int, int]:
        """Return the requests, bytes and work of a client."""
        requests, nbytes, work = self.by_client.get(client, (0, 0, 0))
        return requests, nbytes, work


class Pace:
    """Work that leaves the queue per second, while others wait."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._last: float | None = None

    def left(self, work: int, now: float, crowded: bool) -> None:
        """Record that work left the queue.

        Args:
            now: in seconds.
            crowded: others wait still; else nothing is learned from the time until the next.
        """
        if self._last is not None:
            seconds = max(0.0, now - self._last)
            keep = math.exp(-seconds / MEMORY_S)
            self._work, self._seconds = self._work * keep + work, self._seconds * keep + seconds
        self._last = now if crowded else None

    @property
    def known(self) -> float | None:
        """Work per second; None if too little has been seen."""
        return self._work / self._seconds if self._seconds >= LEAST_SEEN_S and self._work > 0 else None


class Admission:
    """Decides if a request may wait.

    Args:
        max_requests, max_bytes, max_wait: bounds of what waits (seconds for the wait); None for none.
    """

    def __init__(
        self, max_requests: int | None = None, max_bytes: int | None = None, max_wait: float | None = None
    ) -> None:
        self.max_requests, self.max_bytes, self.max_wait = max_requests, max_bytes, max_wait
        self.pace = Pace()

    def check(self, claim: Claim, waiting: Ledger, ahead: float, retry_after: float) -> None:
        """Refuse a request that exceeds a bound.

        Args:
            waiting: requests that wait, with their memory and work.
            ahead: share of its work that goes before this request, 0 to 1.
            retry_after: seconds, for bounds other than the wait.

        Raises:
            QueueFull: says which bound.
        """
        count = waiting.requests
        if self.max_requests is not None and count >= self.max_requests:
            raise QueueFull(count, retry_after)
        if self.max_bytes is not None:
            own = waiting.of(claim.client)[1]
            if own and own + claim.nbytes > OWN_SHARE * self.max_bytes:
                reason = f"this client's requests that wait hold {own >> 20} MiB, the most that one client may have"
                raise QueueFull(count, retry_after, reason, own=True)
            if count and waiting.nbytes + claim.nbytes > self.max_bytes:
                reason = f"{count} requests with {waiting.nbytes >> 20} MiB wait already, the most that the queue holds"
                raise QueueFull(count, retry_after, reason)
        pace = self.pace.known
        if self.max_wait is None or pace is None:
            return
        wait = waiting.work * ahead / pace
        if wait > self.max_wait:
            own_work = waiting.of(claim.client)[2]
            after = min(max(wait - self.max_wait, LEAST_RETRY_S), MOST_RETRY_S)
            reason = f"this request would wait for about {wait:.0f} s, longer than the limit of {self.max_wait:g} s"
            raise QueueFull(count, after, reason, own=own_work >= OWN_SHARE * waiting.work * ahead)
