"""Check that an arriving request can run at all, and turn it into sequences, with their numbers, ranks and seeds."""

from __future__ import annotations

import math
import secrets
from hashlib import blake2b

from .policies.admission import Claim
from .policies.order import PATIENCE_STEPS, Key, Order, check_priority
from .request import Request, RequestState, Sequence
from .scheduler_config import SchedulerConfig

CONTINUED = 2**62
"""Offset in the order of arrival for requests that began elsewhere: they rank before all new requests; those with
tokens rank first, like preempted ones."""


def max_length(request: Request, config: SchedulerConfig) -> int:
    """Return the most prompt + output tokens of one choice: limited by ``max_tokens`` or the context length.

    Raises:
        ValueError: there is no room for output in the context, for the choices among the running sequences, or for one
            choice's KV in the whole pool; or it has a priority that the policy ignores. The message has the numbers
            and what to change.
    """
    check_priority(request.priority, config.scheduling_policy)
    prompt, params = len(request.prompt_token_ids), request.params
    if prompt >= config.max_model_len:
        raise ValueError(
            f"the prompt has {prompt} tokens, but the context length is {config.max_model_len} tokens and must also "
            "hold at least one token of output: shorten the prompt"
        )
    check_choices(params.n, config.max_num_seqs)
    longest = config.max_model_len
    if params.max_tokens is not None:
        longest = min(longest, prompt + params.max_tokens)
    needed = _blocks(longest, config)
    if needed > config.num_blocks:
        capacity = config.num_blocks * config.block_size
        advice = f"set max_tokens to at most {capacity + 1 - prompt}" if prompt <= capacity else "shorten the prompt"
        raise ValueError(
            f"a prompt of {prompt} tokens and up to {longest - prompt} tokens of output need {needed} KV blocks of "
            f"{config.block_size} tokens, but the cache has {config.num_blocks}: {advice}, or enlarge the cache"
        )
    known = max(map(len, filter(None, request.output_token_ids or ())), default=0)
    if prompt + known >= longest:
        raise ValueError(
            f"the answer to continue has {known} tokens after a prompt of {prompt}, and its engine ends answers at "
            f"{longest} tokens in all: continue it in an engine with a context as long as that of the first"
        )
    return longest


def check_choices(n: int, max_num_seqs: int) -> None:
    """Refuse more choices than can run at the same time.

    Raises:
        ValueError: says how many can.
    """
    if n > max_num_seqs:
        raise ValueError(f"n is {n}, but the engine runs {max_num_seqs} sequences at most: lower n")


def most_blocks(request: Request, config: SchedulerConfig) -> int:
    """Return the most KV blocks of a request, when all its choices run to their ends together."""
    shared = len(request.prompt_token_ids) // config.block_size
    return shared + request.params.n * (_blocks(max_length(request, config), config) - shared)


def _blocks(length: int, config: SchedulerConfig) -> int:
    """Count the blocks of a sequence of ``length`` tokens. The last token is drawn, but never computed."""
    return -(-(length - 1) // config.block_size)


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
