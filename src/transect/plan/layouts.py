"""All ways to spread a run over some devices: which fit, their predicted step times, and the reasons for the best.

A step has the same tokens under every layout. For each layout the largest micro-batch and the least checkpointing that
fit are not always the fastest together, so all that fit are predicted, and the fastest stands for the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..costs.machine import Machine
from ..costs.memory.fit import PLANS
from ..costs.memory.terms import Estimate
from ..costs.memory.training_plan import TrainingPlan
from ..costs.memory.training_ranks import estimator, for_rank
from ..costs.training import TrainingStep, predict
from ..costs.units import gib
from ..spec.layouts.refusals import reasons
from ..spec.layouts.schedules.registry import schedules
from ..spec.layouts.spread import Spread
from ..spec.model import ModelConfig

MOST_GPUS = 4096
SEQUENCES = (1, 2, 4, 8, 16)
"""Numbers of sequences of a micro-batch to try."""
CHUNKS = (2, 4, 8)
"""Runs of layers per rank to try, for schedules with several."""
AXES = ("data", "tensor", "pipeline", "context")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its settings and predictions."""

    spread: Spread
    plan: TrainingPlan
    time: TrainingStep
    estimate: Estimate

    @property
    def settings(self) -> str:
        """Settings for the run's TOML file."""
        sizes = self.spread.settings
        return (
            f'accumulate = {self.plan.accumulate}, checkpointing = "{self.plan.checkpointing}", '
            f"data.micro_batch = {self.plan.micro_batch}" + (f"; [parallel] {sizes}" if sizes else "")
        )

    def __str__(self) -> str:
        sequences = self.plan.micro_batch // self.plan.seq_len
        each = f"{sequences} x {self.plan.seq_len}" if sequences else str(self.plan.micro_batch)
        return f"{self.spread}, {each} tokens, checkpointing {self.plan.checkpointing}"


@dataclass(frozen=True, slots=True)
class Ranking:
    """All layouts of a number of devices.

    Attributes:
        fitting: the best way of each layout, the fastest first.
        others: for each other layout the way that needs least memory, in order of memory.
        refused: reason that a layout is impossible, by layout.
        budget: bytes of a device.
    """

    gpus: int
    fitting: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    refused: tuple[tuple[Spread, str], ...]
    budget: int

    @property
    def best(self) -> Candidate | None:
        """Fastest candidate that fits."""
        return self.fitting[0] if self.fitting else None

    def reasons(self) -> list[str]:
        """Explain the choice of the best layout, one sentence a line: the additional time of the runners-up, and faster
        layouts that do not fit."""
        best = self.best
        if best is None:
            return []
        found = []
        for other in self.fitting[1:4]:
            slower = other.time.seconds / best.time.seconds - 1
            found.append(f"{other.spread}: {slower:.1%} slower, {_difference(best.time, other.time)}")
        faster = [c for c in self.others if c.time.seconds < best.time.seconds]
        for other in sorted(faster, key=lambda c: c.time.seconds)[:2]:
            gain = best.time.seconds / other.time.seconds - 1
            found.append(
                f"{other.spread} would be {gain:.1%} faster and needs {gib(other.estimate.needed)} of "
                f"{gib(self.budget)} ({_largest(other.estimate)})"
            )
        return found


def _difference(best: TrainingStep, other: TrainingStep) -> str:
    """Describe the parts in which ``other`` takes longer."""
    more = {name: value - best.parts[name] for name, value in other.parts.items()}
    shown = sorted(((value, name) for name, value in more.items() if value > 0.002 * best.seconds), reverse=True)[:2]
    return " and ".join(f"{1e3 * value:.1f} ms more of {name}" for value, name in shown) or "by a little of everything"


def _largest(estimate: Estimate) -> str:
    held = sorted(estimate.worst.held.items(), key=lambda item: -item[1])[:2]
    return "most: " + ", ".join(f"{name} {gib(size)}" for name, size in held)


def spreads(gpus: int, machine: Machine, *, axes: Iterable[str] = AXES, host_state: bool = False) -> Iterator[Spread]:
    """Yield every way to lay out ``gpus`` ranks; tensor and context ranks stay within a host."""
    axes = set(axes)
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    kinds = [(kind.name, n) for kind in schedules().values() for n in (CHUNKS if kind.chunked else (1,))]
    for tensor in sizes if "tensor" in axes else [1]:
        for context in (n for n in sizes if gpus % (n * tensor) == 0) if "context" in axes else [1]:
            if tensor * context > machine.per_host:
                continue
            for pipeline in (n for n in sizes if gpus % (n * tensor * context) == 0) if "pipeline" in axes else [1]:
                data = gpus // (tensor * context * pipeline)
                if data > 1 and "data" not in axes:
                    continue
                for zero in (0, 1, 2, 3) if data > 1 else (0,):
                    for schedule, chunks in kinds if pipeline > 1 else [("1f1b", 1)]:
                        yield Spread(
                            data=data, zero=zero, tensor=tensor, pipeline=pipeline, context=context, schedule=schedule,
                            chunks=chunks, sequence=tensor > 1, reduce=2, host_state=host_state,
                        )  # fmt: skip


def rank(
    config: ModelConfig,
    plan: TrainingPlan,
    gpus: int,
    machine: Machine,
    tokens: int,
    *,
    budget: int | None = None,
    axes: Iterable[str] = AXES,
    host_state: bool = False,
) -> Ranking:
    """Try every layout of ``gpus`` devices.

    Args:
        plan: task, precision, optimizer and ``seq_len`` of the run; micro-batch and checkpointing are chosen.
        tokens: tokens of a step on all devices together.
        budget: free bytes of a device; None for all.
        axes: the ``AXES`` that may have several ranks.

    Raises:
        ValueError: a number is out of range, or a step has fewer tokens than one sequence for each device.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise ValueError(f"the number of GPUs is between 1 and {MOST_GPUS}, not {gpus}")
    if tokens < plan.seq_len:
        raise ValueError(f"a step of {tokens} tokens is less than one sequence of {plan.seq_len}: ask for more tokens")
    budget = machine.memory_bytes if budget is None else budget
    fitting, others, refused = [], [], []
    for spread in spreads(gpus, machine, axes=axes, host_state=host_state):
        account = estimator(spread)
        why = next(reasons(replace(plan.run, accumulate=spread.data * spread.pipeline), spread, config), None)
        if why is not None:
            refused.append((spread, why.why))
            continue
        best: Candidate | None = None
        least: Candidate | None = None
        reason = f"a step of {tokens} tokens has no sequence for each of {spread.data} data ranks"
        done = 0
        for candidate in _ways(plan, spread, tokens):
            if candidate.micro_batch == done:  # what keeps less is slower
                continue
            try:
                estimate = account(config, candidate)
                fits = estimate.fits(budget)
                if not fits and least is not None and estimate.needed >= least.estimate.needed:
                    continue
                found = Candidate(spread, candidate, predict(config, candidate, spread, machine), estimate)
            except ValueError as error:
                reason = str(error)
                continue
            if fits:
                done = candidate.micro_batch
                best = found if best is None or found.time.seconds < best.time.seconds else best
            else:
                least = found
        if best is not None:
            fitting.append(best)
        elif least is not None:
            others.append(least)
        else:
            refused.append((spread, reason))
    fitting.sort(key=lambda c: c.time.seconds)
    others.sort(key=lambda c: c.estimate.needed)
    return Ranking(gpus, tuple(fitting), tuple(others), tuple(refused), budget)


def _ways(plan: TrainingPlan, spread: Spread, tokens: int) -> Iterator[TrainingPlan]:
    """Yield micro-batches and checkpointing to try: steps have the requested tokens, or the next number that all ranks
    can share."""
    seen = set()
    for sequences in SEQUENCES:
        size = sequences * plan.seq_len
        if size > tokens:
            break
        each = max(1, round(tokens / size / spread.data))
        for kept in PLANS:
            way = replace(plan, micro_batch=size, accumulate=each * spread.data, checkpointing=kept)
            whole = for_rank(way, spread)
            if (size, whole.checkpointing) not in seen:
                seen.add((size, whole.checkpointing))
                yield whole


def what_would(
    config: ModelConfig, plan: TrainingPlan, ranking: Ranking, machine: Machine, tokens: int, axes: Iterable[str] = AXES
) -> list[str]:
    """List changes that would make something fit, each as a clause, for rankings in which nothing fits."""
    found = []
    if ranking.others:
        least = ranking.others[0]
        found.append(f"devices with {gib(least.estimate.needed)} of free memory ({least})")
    offloaded = rank(
        config, plan, ranking.gpus, machine, tokens, budget=ranking.budget, axes=axes, host_state=True
    ).best  # fmt: skip
    if offloaded is not None:
        there = sum(term.bytes for term in offloaded.estimate.host)
        found.append(f"--offload: {gib(there)} of states a rank on the host ({offloaded.spread})")
    needed = ranking.others[0].estimate.needed if ranking.others else 0
    for gpus in (2**power * ranking.gpus for power in range(1, 7)):
        if gpus > MOST_GPUS:
            break
        if needed * ranking.gpus > gpus * ranking.budget:
            continue  # even if every byte were cut for all of them
        more = rank(
            config, plan, gpus, machine, max(tokens, gpus * plan.seq_len), budget=ranking.budget, axes=axes
        ).best
        if more is not None:
            found.append(f"--gpus {gpus} ({more.spread})")
            break
    if plan.optimizer != "adamw8bit":
        smaller = replace(plan, optimizer="adamw8bit")
        small = rank(config, smaller, ranking.gpus, machine, tokens, budget=ranking.budget, axes=axes).best
        if small is not None:
            found.append(f"--optimizer adamw8bit ({small.spread})")
    if not plan.adapted and plan.task != "pretrain":
        adapted = replace(plan, task="lora")
        small = rank(config, adapted, ranking.gpus, machine, tokens, budget=ranking.budget, axes=axes).best
        if small is not None:
            found.append(f"--task lora ({small.spread})")
    return found
