"""Limits of clients (requests and tokens a minute, parallel requests), and the usage of each client.

The requests of a minute, and its tokens, are a bucket that fills evenly (token bucket): a client that was quiet may
send as much at once as it may in a minute. Tokens are paid when a request has ended. So requests that run may overdraw
the bucket, and the next request is refused until it is refilled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from .clients import Client
from .errors import ApiError

ANONYMOUS = "(no key)"
"""Name of all clients without keys in metrics, whose number is unbounded."""
PARALLEL_RETRY_S = 1.0


class Bucket:
    """Limit on a number per minute.

    Args:
        limit: None for no limit.
        now: seconds.
    """

    def __init__(self, limit: int | None, now: float) -> None:
        self._limit, self._left, self._at = limit, float(limit or 0), now

    def wait(self, now: float, amount: float = 0.0) -> float:
        """Return the seconds until ``amount`` is available, or until anything is available if ``amount`` is 0."""
        if self._limit is None:
            return 0.0
        self._left = min(self._limit, self._left + (now - self._at) * self._limit / 60)
        self._at = now
        missing = amount - self._left if amount else -self._left + 1e-9
        return max(0.0, missing * 60 / self._limit)

    def take(self, amount: float) -> None:
        """Take ``amount`` out of the bucket; the balance may become negative."""
        self._left -= amount


@dataclass(slots=True)
class _Account:
    requests: Bucket
    tokens: Bucket
    running: int = 0


class Accounts:
    """The accounts of clients with keys.

    Args:
        registry: of the server's metrics.
        clock: seconds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._requests = Counter("transect_client_requests", "Requests of a client", ["client"], registry=registry)
        self._refused = Counter(
            "transect_client_refusals", "Requests refused by a client's limits", ["client", "limit"], registry=registry
        )
        self._prompt_tokens = Counter(
            "transect_client_prompt_tokens", "Prompt tokens of a client", ["client"], registry=registry
        )
        self._generation_tokens = Counter(
            "transect_client_generation_tokens", "Tokens generated for a client", ["client"], registry=registry
        )

    def enter(self, client: Client) -> None:
        """Account for a request that begins. Each call that returns must be followed by ``leave``.

        Raises:
            ApiError: 429, the client is at a limit; ``Retry-After`` says when it no longer is.
        """
        account, now = self._account(client), self._clock()
        waits = {
            "requests_per_minute": account.requests.wait(now, 1.0),
            "tokens_per_minute": account.tokens.wait(now),
            "parallel": PARALLEL_RETRY_S if client.parallel is not None and account.running >= client.parallel else 0.0,
        }
        name, seconds = max(waits.items(), key=lambda each: each[1])
        if seconds > 0:
            self._refused.labels(_shown(client), name).inc()
            after = max(1, math.ceil(seconds))
            message = f"{client.name} is at its limit {name} ({getattr(client, name)}): come back in {after} s"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(after)})
        account.requests.take(1)
        account.running += 1
        self._requests.labels(_shown(client)).inc()

    def leave(self, client: Client) -> None:
        """Account for a request that has ended."""
        self._account(client).running -= 1

    def spend(self, client: Client, prompt: int, generated: int) -> None:
        """Charge a client for computed tokens."""
        self._account(client).tokens.take(prompt + generated)
        self._prompt_tokens.labels(_shown(client)).inc(prompt)
        self._generation_tokens.labels(_shown(client)).inc(generated)

    def _account(self, client: Client) -> _Account:
        name = client.name if client.has_key else ANONYMOUS  # without keys there are no limits
        account = self._accounts.get(name)
        if account is None:
            now = self._clock()
            account = _Account(Bucket(client.requests_per_minute, now), Bucket(client.tokens_per_minute, now))
            self._accounts[name] = account
        return account


def _shown(client: Client) -> str:
    return client.name if client.has_key else ANONYMOUS
