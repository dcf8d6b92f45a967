"""Check that a request can run at all, and bound the memory it may take."""

from __future__ import annotations

from .policies.order import check_priority
from .request import Request
from .scheduler_config import SchedulerConfig


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
