"""Turn an arriving request into sequences, with their numbers, ranks and seeds."""

from __future__ import annotations

import secrets
from hashlib import blake2b

from .request import Request, RequestState, Sequence
from .scheduler_config import SchedulerConfig

CONTINUED = 2**62
"""Requests that began elsewhere rank before all that came here, as if they had arrived this many requests earlier;
those that have tokens come first of all, as preempted ones do."""


def seed_of(engine: int, number: int) -> int:
    """The seed of request ``number`` of an engine, where it has none of its own."""
    key = blake2b(f"{engine} {number}".encode(), digest_size=8)
    return int.from_bytes(key.digest(), "little")


class Arrivals:
    """Numbers the requests of an engine in the order of their arrival, and their sequences.

    Args:
        config: says by what requests are ranked, and from what seed theirs come.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._ranked = config.policy != "static"
        self._longest_first = config.longest_first
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._requests = self._sequences = 0

    def state(self, request: Request, max_length: int, now: float) -> RequestState:
        """The state of a request that arrives, with a sequence for each choice.

        Args:
            max_length: tokens of prompt and answer at which its choices end.
            now: seconds on the engine's clock.
        """
        state = RequestState(request, now if request.arrival_time is None else request.arrival_time, max_length)
        seed = request.params.seed
        if seed is None:
            seed = seed_of(self._seed, self._requests)
        priority = request.priority if self._ranked else 0
        order = len(request.prompt_token_ids) - max_length if self._longest_first and self._ranked else 0
        number = self._requests
        if (given := request.output_token_ids) is not None:
            number -= 2 * CONTINUED if any(given) else CONTINUED * self._ranked  # static batches are not joined
        for index in range(request.params.n):
            rank = (priority, order, number, index)
            state.choices.append(Sequence(state, self._sequences, index, rank, seed))
            self._sequences += 1
        self._requests += 1
        return state
