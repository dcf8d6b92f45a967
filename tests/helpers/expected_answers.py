"""What a request of a random workload must yield, worked out from the request alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grammar_fakes import allowed_after
from kv_checker import VOCAB, chain_of, draw_token, extend_chain

from transect.engine.scheduling.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from engine_workloads import Arrival

EOS = 0


def can_fit(arrival: Arrival, config: SchedulerConfig) -> bool:
    """Whether the engine must take the request, said in another way than the scheduler does."""
    prompt = len(arrival.prompt)
    most = config.max_model_len if arrival.params.max_tokens is None else prompt + arrival.params.max_tokens
    computed = min(most, config.max_model_len) - 1
    return (
        prompt < config.max_model_len
        and arrival.params.n <= config.max_num_seqs
        and computed <= config.num_blocks * config.block_size
    )


def expected_tokens(arrival: Arrival, config: SchedulerConfig, choice: int) -> tuple[list[int], str, int | None]:
    """Output tokens, finish reason and stop reason of a choice that nobody disturbs."""
    params = arrival.params
    eos = () if params.ignore_eos else (EOS,)
    stops = (*eos, *(params.stop_token_ids or ()))
    seed = params.seed
    assert seed is not None
    chain = chain_of(arrival.prompt)
    tokens: list[int] = []
    while True:
        position = len(arrival.prompt) + len(tokens)
        if arrival.fail == (choice, position) and arrival.grammar is None:
            return tokens, "error", None
        early = len(tokens) < params.min_tokens
        masked = set(stops if early else ())
        if arrival.grammar is not None:
            masked.update(set(range(VOCAB)) - allowed_after(arrival.grammar[0], VOCAB, tokens))
        token = draw_token(seed, choice, chain, masked)
        if arrival.grammar is not None and arrival.grammar[2] == len(tokens):
            return tokens, "error", None
        tokens.append(token)
        chain = extend_chain(chain, token)
        if token in stops and not early:
            return tokens, "stop", None if token in eos else token
        if arrival.grammar is not None and (token == EOS or len(tokens) == arrival.grammar[1]):
            return tokens, "stop", None
        if len(tokens) == params.max_tokens or position + 1 == config.max_model_len:
            return tokens, "length", None
