"""Fitting of a training plan into memory: checkpointing that fits, and the smallest change that makes a plan fit.

Changes are tried in the order in which they cost least of what the run is for: a checkpointing plan that keeps less and
a smaller micro-batch with more of them to a step (the same numbers, slower), 8-bit moments, then adapters in place of
all weights, then adapters on a base of 4 bits. First each alone; if none is enough, together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...spec.model import ModelConfig
from ...spec.numbers.registry import base_formats
from ..units import gib
from .kept import Kept
from .terms import Estimate
from .training import training
from .training_plan import TrainingPlan, fitting_groups, ungrouped_base

Estimator = Callable[[ModelConfig, TrainingPlan], Estimate]
"""Function that accounts for a plan: on one device, or on the rank of several that needs most
(``training_ranks.py``)."""
PLANS: tuple[Kept, ...] = ("none", "selective", "full")
"""Checkpointing plans, from the fastest to the smallest."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another plan that fits, and the differences, in the words of the configuration file."""

    plan: TrainingPlan
    settings: tuple[tuple[str, str], ...]
    estimate: Estimate

    def __str__(self) -> str:
        what = " and ".join(f"{name} = {value}" for name, value in self.settings)
        return f"{what} (needs {gib(self.estimate.needed)})"


def first_that_fits(
    config: ModelConfig, plan: TrainingPlan, budget: int, account: Estimator = training
) -> tuple[TrainingPlan, Estimate] | None:
    """Return ``plan`` with the first checkpointing that fits in ``budget`` bytes; None if none does. With merged
    layers, as many layers as then still fit keep everything."""
    for kept in PLANS:
        candidate = replace(plan, checkpointing=kept)
        estimate = account(config, candidate)
        if not estimate.fits(budget):
            continue
        most = config.n_layers - 1 if plan.merged and kept != "none" else 0
        for whole in range(most, 0, -1):
            better = replace(candidate, whole=whole)
            if (more := account(config, better)).fits(budget):
                return better, more
        return candidate, estimate
    return None


def smallest_change(
    config: ModelConfig, plan: TrainingPlan, budget: int, account: Estimator = training
) -> Change | None:
    """Return the first change, in the order above, that makes ``plan`` fit in ``budget`` bytes; None if none does."""
    for candidate in _candidates(config, plan):
        try:
            estimate = account(config, candidate)
        except ValueError:  # it cannot be spread as the plan is
            continue
        if estimate.fits(budget):
            return Change(candidate, tuple(_differences(plan, candidate)), estimate)
    return None


def refusal(
    config: ModelConfig, plan: TrainingPlan, budget: int, estimate: Estimate, account: Estimator = training
) -> str:
    """Explain in one sentence why a run cannot start, and the change that helps."""
    worst = estimate.worst
    most = sorted(worst.held.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {gib(size)}" for name, size in most)
    change = smallest_change(config, plan, budget, account)
    advice = f"set {change}" if change else "take a smaller model, a shorter data.seq_len, or a device with more memory"
    needs = f"this run needs {gib(estimate.needed)} and {gib(budget)} are free"
    return f"{needs} (most at the {worst.name}: {parts}): {advice}"


def _candidates(config: ModelConfig, plan: TrainingPlan) -> Iterator[TrainingPlan]:
    less = [replace(plan, checkpointing=kept) for kept in PLANS[PLANS.index(plan.checkpointing) + 1 :]]
    tasks = [] if plan.task == "pretrain" else [t for t in ("lora", "qlora") if _below(plan.task, t)]
    small = [replace(plan, optimizer="adamw8bit")] if plan.optimizer != "adamw8bit" else []
    yield from less
    yield from _smaller_batches(plan)
    yield from small
    yield from (_as_task(config, plan, task) for task in tasks)
    # Together: as little kept as possible, and on top one more of the others at a time.
    base = less[-1] if less else plan
    yield from _smaller_batches(base)
    for task in (plan.task, *tasks):
        for optimizer in dict.fromkeys((plan.optimizer, "adamw8bit")):
            other = replace(_as_task(config, base, task), optimizer=optimizer)
            yield other
            yield from _smaller_batches(other)


def _as_task(config: ModelConfig, plan: TrainingPlan, task: str) -> TrainingPlan:
    """Return the plan for another task; a base of 4 bits in groups that fit the model."""
    other = replace(plan, task=task)  # type: ignore[arg-type]
    base = base_formats()[plan.base_format].base
    if task == plan.task or task != "qlora" or base is None or not base.grouped:
        return other
    groups = fitting_groups(config)
    if not groups:
        return replace(other, base_format=ungrouped_base())
    return other if plan.group in groups else replace(other, group=groups[-1])


def _smaller_batches(plan: TrainingPlan) -> Iterator[TrainingPlan]:
    """Yield the micro-batch divided by 2, 3, ..., down to one sequence, with correspondingly more of them per step."""
    most = plan.micro_batch // plan.seq_len
    for parts in range(2, most + 1):
        tokens = -(-most // parts) * plan.seq_len
        if plan.objective != "grpo" and (parts == most or tokens < -(-most // (parts - 1)) * plan.seq_len):
            yield replace(plan, micro_batch=tokens, accumulate=plan.accumulate * parts)


def _below(task: str, other: str) -> bool:
    order = ("finetune", "lora", "qlora")
    return order.index(other) > order.index(task)


def _differences(old: TrainingPlan, new: TrainingPlan) -> Iterator[tuple[str, str]]:
    for name, setting in (
        ("checkpointing", "checkpointing"),
        ("micro_batch", "data.micro_batch"),
        ("accumulate", "accumulate"),
        ("optimizer", "optimizer.name"),
        ("task", "task"),
        ("group", "lora.group"),
        ("base_format", "lora.base_format"),
    ):
        value = getattr(new, name)
        if value != getattr(old, name):
            yield setting, str(value) if isinstance(value, int) else f'"{value}"'
