"""Answers of the model in training, drawn by the serving engine.

The same scheduler, paged cache and sampler run in this process, over the very weights that the optimizer changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.executors.runner import Runner
from ...engine.scheduling.clock import WallClock
from ...engine.scheduling.core import EngineCore
from ...engine.scheduling.request import Request
from ...engine.scheduling.sampling_params import SamplingParams
from ...engine.scheduling.scheduler import Scheduler
from ...engine.scheduling.scheduler_config import SchedulerConfig
from ...models.decoder import Decoder

BLOCK_SIZE = 16
MOST_RUNNING = 64
"""Number of answers drawn at the same time."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One answer to prompt ``prompt``: its tokens, and each one's log-probability under the raw logits."""

    prompt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def roll_out(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    seed: int,
    most_running: int = MOST_RUNNING,
) -> list[SampledAnswer]:
    """Draw ``params.n`` answers to each prompt, in order: a function of the weights, the prompts, ``params`` and
    ``seed``.

    The paged cache lives as long as the call: keys and values of earlier weights are of no use.

    Raises:
        RuntimeError: the engine could not compute an answer (logits that are not finite).
    """
    assert params.max_tokens is not None
    longest = max(len(prompt) for prompt in prompts) + params.max_tokens
    running = min(most_running, len(prompts) * params.n)
    running = max(running, params.n)
    blocks = running * (-(-longest // BLOCK_SIZE) + 1)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=max(512, running),
            max_model_len=longest,
            enable_prefix_caching=False,
        ),
        WallClock(),
    )
    dtype = model.norm.weight.dtype
    core = EngineCore(scheduler, Runner(model, *model.new_kv_cache(blocks, BLOCK_SIZE, dtype)))
    for index, prompt in enumerate(prompts):
        seeded = _with_seed(params, seed * 1_000_003 + index)
        core.add(Request(str(index), tuple(prompt), seeded, eos_token_ids=tuple(eos_token_ids)))
    tokens: dict[tuple[int, int], list[int]] = {}
    logprobs: dict[tuple[int, int], list[float]] = {}
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(f"the engine could not draw an answer: {output.error}")
            key = int(output.request_id), output.index
            tokens.setdefault(key, []).extend(output.new_token_ids)
            logprobs.setdefault(key, []).extend(entry.logprob for entry in output.logprobs or ())
    return [SampledAnswer(key[0], tuple(tokens[key]), tuple(logprobs[key])) for key in sorted(tokens)]


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return dataclasses.replace(params, seed=seed % 2**63, logprobs=0)
