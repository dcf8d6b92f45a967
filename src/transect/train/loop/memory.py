"""Chooses the checkpointing that fits in the free memory before a run starts, or refuses the run."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...costs.memory.fit import first_that_fits, refusal
from ...costs.memory.kept import Kept
from ...costs.memory.terms import Estimate
from ...costs.memory.training_plan import TrainingPlan
from ...costs.memory.training_ranks import estimator
from ...costs.units import gib, parse_bytes
from ...hardware.host_memory import free_memory
from ...parallel.world import World
from ...spec.layouts.spread import Spread
from ...spec.model import ModelConfig
from ...spec.weights import weight_shapes
from ..adapters.lora import adapted, saved_weights, settled
from ..config import TrainConfig
from ..config.adapters import MATRICES, TABLES
from ..model.build import teacher_of
from ..model.merging import refusal as refusal_to_merge
from .crew import asked

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The checkpointing of a run, the account of its memory, and a line with the reason."""

    checkpointing: Kept
    estimate: Estimate
    why: str
    whole: int = 0
    """Number of last layers that keep everything whatever the plan."""


def check_length(config: TrainConfig, model: ModelConfig) -> None:
    """Check that the model has positions for documents of ``data.seq_len`` tokens. Raises ValueError."""
    most = model.max_position
    if config.data.seq_len > most:
        raise ValueError(
            f"data.seq_len is {config.data.seq_len} tokens and {config.model} knows {most} positions: set data.seq_len "
            f"to at most {most}"
        )


def plan_of(config: TrainConfig, model: ModelConfig, device: torch.device) -> TrainingPlan:
    """Return the memory plan of a configuration; ``auto`` checkpointing counts as none."""
    rollouts = copied = 0
    if config.objective == "grpo":
        from ..objectives.adapter_engine import draws_by_adapter
        from ..objectives.rollout import BLOCK_SIZE, most_running

        running = most_running(config.grpo)
        copied = _numbers(model) if draws_by_adapter(config, device) else 0
        rollouts = running * (-(-config.data.seq_len // BLOCK_SIZE) + 1) * BLOCK_SIZE
    if config.freezes and config.task == "finetune":  # a part beside the model is small, as adapters are
        config = replace(config, task="lora", objective="next_token", own=None)
    lora_task = config.task in ("lora", "qlora")
    lora = settled(config.lora, config.new_tokens) if lora_task else config.lora
    named = adapted(config.lora, model) if lora_task else MATRICES
    last = {name.rpartition(".")[2] for name in named}
    chosen: Any = "none" if config.checkpointing == "auto" else config.checkpointing
    return TrainingPlan(
        task=config.task,
        objective=config.objective,
        precision=config.precision,
        optimizer=config.optimizer.name,
        checkpointing=chosen,
        seq_len=config.data.seq_len,
        micro_batch=config.data.micro_batch,
        accumulate=config.accumulate,
        rank=lora.rank,
        targets=tuple(name for name in (*MATRICES, *TABLES) if name in last),
        saved=tuple(saved_weights(lora, model)) if lora_task else (),
        group=config.lora.group,
        base_format=config.lora.base_format,
        rollouts=rollouts,
        reference=config.objective == "grpo" and config.compares,
        teacher=_numbers(teacher_of(config).config) if config.objective == "distill" else copied,
        backend="cpu" if device.type == "cpu" else "gpu",
        merged=(
            config.merged
            and config.parallel.tiles == 1
            and config.layer_keep == 1.0
            and device.type == "cuda"
            and not refusal_to_merge(model)
            and not (lora_task and config.lora.refuses_merging())
        ),
    )


def spread_of(config: TrainConfig, device: torch.device) -> Spread:
    """Return the distribution of a run on this device.

    On a CPU, offloaded states are in its own memory, or on a disk.
    """
    parallel = config.parallel
    elsewhere = parallel.offload != "none" and (device.type == "cuda" or bool(parallel.offload_path))
    streams = elsewhere and parallel.offload == "all"
    level = 3 if streams else parallel.zero
    tiles = parallel.tiles if level == 3 else 1
    return replace(asked(parallel), zero=level, tiles=tiles, host_state=elsewhere, host_weights=streams)


def _numbers(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(model).values())


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device, for this process; None if the system does not report it."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        return free_memory()
    except ValueError:
        return None


def least_free(device: torch.device, world: World | None) -> int | None:
    """Return ``free_bytes`` of the rank with the least, so that all ranks choose the same checkpointing: their
    recomputations must match. Ranks on a CPU share their host's memory. All ranks call it."""
    mine = free_bytes(device)
    if world is None:
        return mine
    if mine is not None and device.type == "cpu":
        mine //= world.on_host
    return min((each for each in world.exchange(mine) if each is not None), default=None)


def fit(config: TrainConfig, model: ModelConfig, device: torch.device, free: int | None = None) -> Fitted:
    """Choose the checkpointing of a run, before its model is built.

    Args:
        free: bytes to stay within; None for the device's free memory.

    Raises:
        ValueError: the run does not fit; the message names the smallest change with which it does.
    """
    plan, account = plan_of(config, model, device), estimator(spread_of(config, device))
    free = free_bytes(device) if free is None else free
    if config.memory:
        limit = parse_bytes(config.memory)
        free = limit if free is None else min(free, limit)
    if free is None:
        chosen = f"checkpointing {plan.checkpointing}: this system does not report its free memory"
        return _said(Fitted(plan.checkpointing, account(model, plan), chosen))
    asked = config.checkpointing != "auto"
    found = (plan, account(model, plan)) if asked else first_that_fits(model, plan, free, account)
    if found is None or not found[1].fits(free):
        least = plan if asked else replace(plan, checkpointing="full")
        raise ValueError(refusal(model, least, free, account(model, least), account))
    plan, estimate = found
    _check_host(config, estimate)
    reason = "as set" if asked else "the first plan that fits"
    if plan.whole:
        reason += f", the last {plan.whole} of {model.n_layers} layers without"
    return _said(
        Fitted(
            plan.checkpointing,
            estimate,
            f"checkpointing {plan.checkpointing} ({reason}): {gib(estimate.peak)} at the {estimate.worst.name}, with "
            f"the margin {gib(estimate.needed)} of {gib(free)} free",
            plan.whole,
        )
    )


def _check_host(config: TrainConfig, estimate: Estimate) -> None:
    """Check that the data of all ranks of this host fits there together. Gradients are in host memory even if the rest
    is on a disk."""
    on_disk = bool(config.parallel.offload_path)
    ranks = min(config.parallel.layout.size, max(1, torch.cuda.device_count()))
    needed = ranks * sum(term.bytes for term in estimate.host if not on_disk or term.name == "gradients")
    try:
        free = free_memory()
    except ValueError:
        return
    if needed > free:
        raise ValueError(
            f"what is offloaded needs {gib(needed)} of the host's memory and {gib(free)} are free: "
            + ("" if on_disk else "set parallel.offload_path to a folder on a fast disk, or ")
            + "take a smaller model"
        )


def _said(fitted: Fitted) -> Fitted:
    log.info("%s", fitted.why)
    return fitted
