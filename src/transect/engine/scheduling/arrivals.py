"""Turn an arriving request into sequences, with their numbers, ranks and seeds."""

from __future__ import annotations

import math
import secrets
from hashlib import blake2b

from .policies.admission import Claim
from .policies.order import PATIENCE_STEPS, Key, Order
from .request import Request, RequestState, Sequence
from .scheduler_config import SchedulerConfig

CONTINUED = 2**62
"""Offset in the order of arrival for requests that began elsewhere: they rank before all new requests; those with
tokens rank first, like preempted ones."""


def seed_of(engine: int, number: int) -> int:
    """Derive the seed of request ``number`` of an engine; used if the request has no seed of its own."""
    key = blake2b(f"{engine} {number}".encode(), digest_size=8)
    return int.from_bytes(key.digest(), "little")


class Arrivals:
    """Numbers an engine's requests, in the order of arrival, and their sequences.

    Args:
        config: says by what requests are ranked, and from what seed theirs come.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        patience = float(PATIENCE_STEPS * config.max_num_batched_tokens)
        static = config.batching == "static"
        policy, longest_first = config.scheduling_policy, config.longest_first
        self._joins = not static
        self.order = Order(policy, patience=patience, longest_first=longest_first, arrival=static)
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._requests = self._sequences = 0

    def claim(self, request: Request, max_length: int) -> tuple[Claim, Key]:
        """Return the claim of a request that arrives now, and its key in the order of service."""
        prompt, n = len(request.prompt_token_ids), request.params.n
        key = self.order.key(request.client, request.priority, max_length - prompt)
        return Claim(request.client, request.nbytes, self.order.tokens(prompt, max_length - prompt, n)), key

    def state(self, request: Request, max_length: int, now: float) -> RequestState:
        """Build the state of a request that arrives, with a sequence for each choice.

        Args:
            max_length: tokens of prompt and answer at which its choices end.
            now: seconds on the engine's clock.
        """
        state = RequestState(request, now if request.arrival_time is None else request.arrival_time, max_length)
        seed = request.params.seed
        if seed is None:
            seed = seed_of(self._seed, self._requests)
        prompt, n = len(request.prompt_token_ids), request.params.n
        turn = self.order.enter(request.client, request.weight, request.priority, prompt, max_length - prompt, n)
        state.turn, state.claim = turn, Claim(request.client, request.nbytes, turn.tokens)
        key, number = turn.key, self._requests
        if request.carried_over:
            begun = any(request.output_token_ids or ())
            number -= 2 * CONTINUED if begun else CONTINUED * self._joins  # static batches are not joined
            key = (-math.inf, *key[1:]) if self.order.shared else key
        for index in range(n):
            rank = (*key, number, index)
            state.choices.append(Sequence(state, self._sequences, index, rank, seed))
            self._sequences += 1
        self._requests += 1
        return state
