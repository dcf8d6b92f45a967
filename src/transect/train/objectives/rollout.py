"""Answers of the model in training, drawn by the serving engine.

The same scheduler, paged cache and sampler run in this process, over the very weights that the optimizer changes;
``adapter_engine.py`` draws those of a LoRA with an engine of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...engine.executors.runner import Runner
from ...engine.scheduling.clock import WallClock
from ...engine.scheduling.core import EngineCore
from ...engine.scheduling.outputs import EngineOutput
from ...engine.scheduling.request import Request
from ...engine.scheduling.sampling_params import SamplingParams
from ...engine.scheduling.scheduler import Scheduler
from ...engine.scheduling.scheduler_config import SchedulerConfig
from ...models.decoder import Decoder
from ..config.objectives import GRPOConfig

BLOCK_SIZE = 16
OWN = "rollout-"
"""Beginning of the ids of a rollout's requests."""
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
    running: int = MOST_RUNNING,
) -> list[SampledAnswer]:
    """Draw ``params.n`` answers to each prompt, in order: a function of the weights, the prompts, ``params`` and
    ``seed``.

    The paged cache lives as long as the call: keys and values of earlier weights are of no use.

    Raises:
        RuntimeError: the engine could not compute an answer (logits that are not finite).
    """
    assert params.max_tokens is not None
    longest = max(len(prompt) for prompt in prompts) + params.max_tokens
    running = min(running, len(prompts) * params.n)
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
    return draw_answers(core, prompts, params, eos_token_ids=eos_token_ids, seed=seed)


def most_running(settings: GRPOConfig) -> int:
    """Return the number of answers of a rollout that an engine draws at the same time."""
    return max(min(MOST_RUNNING, settings.prompts * settings.group), settings.group)


def draw_answers(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    seed: int,
    adapter: str = "",
    deliver: Callable[[EngineOutput], object] = id,
) -> list[SampledAnswer]:
    """Draw answers with an engine, which may have other requests; see ``roll_out``.

    Args:
        adapter: content id of the adapter that computes them; empty for none.
        deliver: receives the outputs of other requests.
    """
    for index, prompt in enumerate(prompts):
        seeded = _with_seed(params, seed * 1_000_003 + index)
        ends = tuple(eos_token_ids)
        core.add(Request(f"{OWN}{index}", tuple(prompt), seeded, eos_token_ids=ends, adapter=adapter))
    tokens: dict[tuple[int, int], list[int]] = {}
    logprobs: dict[tuple[int, int], list[float]] = {}
    left = len(prompts) * params.n
    while left:
        for output in core.step():
            if not output.request_id.startswith(OWN):
                deliver(output)
                continue
            if output.error is not None:
                raise RuntimeError(f"the engine could not draw an answer: {output.error}")
            left -= output.finish_reason is not None
            key = int(output.request_id.removeprefix(OWN)), output.index
            tokens.setdefault(key, []).extend(output.new_token_ids)
            logprobs.setdefault(key, []).extend(entry.logprob for entry in output.logprobs or ())
    return [SampledAnswer(key[0], tuple(tokens[key]), tuple(logprobs[key])) for key in sorted(tokens)]


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return dataclasses.replace(params, seed=seed % 2**63, logprobs=0)
