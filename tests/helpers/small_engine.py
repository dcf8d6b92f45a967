"""A small engine on the checking device, requests for it, and what to look at afterwards: for tests of single rules."""

from collections.abc import Callable
from typing import Any

from kv_checker import CheckingExecutor, Violation

from transect.engine.scheduling.batch import ScheduledBatch
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.outputs import EngineOutput
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig


def make(lag: int = 0, **limits: Any) -> EngineCore:
    defaults: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "watermark": 0.0,
        "seed": 0,
    }
    config = SchedulerConfig(**(defaults | limits))
    return EngineCore(Scheduler(config, VirtualClock()), CheckingExecutor(config, late=bool(lag)), lag=lag)


def request(name: str, prompt: int = 6, priority: int = 0, first: int = 1, eos: tuple[int, ...] = (), **params: Any):
    """Prompts of different ``first`` share no prefix."""
    params = {"max_tokens": 4, "seed": 1, "ignore_eos": not eos} | params
    return Request(name, (first, *range(1, prompt)), SamplingParams(**params), priority, None, eos)


def lengths(batch: ScheduledBatch) -> list[int]:
    return [row.num_tokens for row in batch.rows]


def tokens_of(outputs: list[EngineOutput], name: str, index: int = 0) -> list[int]:
    return [t for o in outputs if (o.request_id, o.index) == (name, index) for t in o.new_token_ids]


def order_of_ends(outputs: list[EngineOutput]) -> list[str]:
    return [output.request_id for output in outputs if output.finish_reason]


def recorded_batches(core: EngineCore, limit: int = 10_000) -> tuple[list[ScheduledBatch], list[EngineOutput]]:
    """Run an engine until it has no work; the batches it submitted and all its outputs."""
    batches: list[ScheduledBatch] = []
    submit: Callable = core.executor.submit

    def record(batch: ScheduledBatch):  # type: ignore[no-untyped-def]
        batches.append(batch)
        return submit(batch)

    core.executor.submit = record  # type: ignore[method-assign]
    outputs: list[EngineOutput] = []
    while core.has_work:
        outputs += core.step()
        if len(batches) > limit:
            raise Violation("no end")
    return batches, outputs
