"""The number of engines that a service should have, from periodic observations of queue, load and rate. Plain
arithmetic.

Each policy is a class whose ``wanted`` turns a ``Seen`` into a number of engines; ``POLICIES`` has them by name. A
``Scaler`` bounds and calms the answers: more engines come at once, fewer only after a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

RULES = {"scaling": {"by": ("Scaler.engines",), "scaler": ("concurrency", {"each": 3.0})}}


class Seen(NamedTuple):
    """A service at one moment.

    Attributes:
        at: seconds.
        ready: engines that take requests. starting: engines that will.
        waiting: requests in the queues of engines. running: those that hold KV blocks.
        kv: share of the KV blocks of all ready engines that are in use.
        rate: requests per second since the last look.
        queued_tokens: tokens that the engines still have to compute, prompts and answers.
        tokens_per_s: tokens that a busy engine computes each second; 0 if not known.
    """

    at: float
    ready: int
    starting: int
    waiting: int
    running: int
    kv: float
    rate: float
    queued_tokens: int = 0
    tokens_per_s: float = 0.0


class Policy(Protocol):
    """Computes the desired number of engines."""

    def wanted(self, seen: Seen) -> float:
        """Return the number of engines that the load needs; fractions are rounded up."""
        ...


@dataclass(slots=True)
class Fixed:
    """A constant number of engines."""

    engines: int = 1

    def wanted(self, seen: Seen) -> float:
        """Return the constant."""
        return self.engines


@dataclass(slots=True)
class Concurrency:
    """A target for the requests of each engine: Kubernetes' rule for one metric (HPA).

    Attributes:
        each: requests, waiting or running, that an engine should have.
    """

    each: float = 32.0

    def wanted(self, seen: Seen) -> float:
        """Return the number of all requests over the target per engine."""
        return (seen.waiting + seen.running) / self.each


@dataclass(slots=True)
class Queue:
    """One engine more when requests wait, one fewer when KV blocks are free.

    Attributes:
        long: waiting requests for each ready engine from which one engine is added.
        idle: share of KV blocks in use below which one engine is removed.
    """

    long: float = 1.0
    idle: float = 0.3

    def wanted(self, seen: Seen) -> float:
        """Return the present number, plus or minus one if needed."""
        here = seen.ready + seen.starting
        if seen.waiting > self.long * max(1, seen.ready):
            return here + 1
        return here - 1 if seen.kv < self.idle and not seen.waiting else here


@dataclass(slots=True)
class Backlog:
    """A target for the time in which an engine computes the tokens that it has to.

    Attributes:
        target_s: seconds for the tokens of an engine.
        tokens_per_s: tokens per second of a busy engine until that has been measured; 0 if not known.
    """

    target_s: float = 10.0
    tokens_per_s: float = 0.0

    def wanted(self, seen: Seen) -> float:
        """Return the queued tokens over those that an engine computes within the target; the present number as long as
        no rate is known."""
        rate = seen.tokens_per_s or self.tokens_per_s
        return seen.queued_tokens / (rate * self.target_s) if rate > 0 else seen.ready + seen.starting


@dataclass(slots=True)
class Forecast:
    """The rate at the moment at which a new engine would be ready, by Holt's linear smoothing (1957), over the capacity
    of an engine, which ``transect plan serving`` finds.

    Attributes:
        capacity: requests per second that one engine serves within the targets.
        ahead: seconds to look ahead: the time that an engine takes to start.
        headroom: share of the capacity that is left free.
        smoothing: weight of the newest rate. trend: weight of its newest change.
    """

    capacity: float = 1.0
    ahead: float = 120.0
    headroom: float = 0.15
    smoothing: float = 0.3
    trend: float = 0.1
    _level: float | None = None
    _slope: float = 0.0
    _last: float = 0.0

    def wanted(self, seen: Seen) -> float:
        """Return the expected rate over the usable capacity."""
        if self._level is None:
            self._level = seen.rate
        else:
            step = seen.at - self._last
            before = self._level
            expected = before + self._slope * step
            self._level = expected + self.smoothing * (seen.rate - expected)
            if step > 0:
                self._slope += self.trend * ((self._level - before) / step - self._slope)
        self._last = seen.at
        coming = max(0.0, self._level + max(0.0, self._slope) * self.ahead)
        return coming / (self.capacity * (1 - self.headroom))


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "fixed": Fixed,
    "concurrency": Concurrency,
    "queue": Queue,
    "backlog": Backlog,
    "forecast": Forecast,
}
"""The policies by name."""


class Scaler:
    """Bounds the number that a policy wants. Engines are added at once; they are removed only if fewer were wanted for
    ``patience`` seconds, down to the largest number wanted in that time.

    Raises:
        ValueError: the bounds are not range of at least 1.
    """

    def __init__(self, policy: Policy, least: int = 1, most: int = 64, patience: float = 300.0) -> None:
        if not 1 <= least <= most:
            raise ValueError(
                f"least and most must be numbers of engines with 1 <= least <= most, not {least} and {most}"
            )
        self.policy, self.least, self.most, self.patience = policy, least, most, patience
        self._wanted: deque[tuple[float, int]] = deque()

    def engines(self, seen: Seen) -> int:
        """Return the number of engines to have from now on."""
        wanted = min(self.most, max(self.least, math.ceil(self.policy.wanted(seen) - 1e-9)))
        self._wanted.append((seen.at, wanted))
        while self._wanted and self._wanted[0][0] < seen.at - self.patience:
            self._wanted.popleft()
        here = seen.ready + seen.starting
        return wanted if wanted >= here else min(here, max(each for _, each in self._wanted))
