"""Reasons why a run cannot be distributed over ranks, and the nearest layout that works. Plain arithmetic, no torch.

The trainer, the account of memory, the planner and ``parallelize`` all ask here before anything starts.
Each rule below looks at a whole run and says why it cannot be. ``nearest`` goes through the other layouts of as many
ranks and finds the one that no rule refuses and that differs least, so what a message tells to set does work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..model import ModelConfig
from .schedule import check as check_schedule
from .spread import Spread

AXES = ("data", "pipeline", "tensor", "context")
ONE_BIT = ("onebit_adam", "onebit_lamb", "zero_one_adam")
"""Optimizers whose ranks exchange signs of the momentum."""
MOST_RANKS = 256
"""Most ranks of a layout for which others are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run that determine possible distributions; names are those of the training configuration.

    Attributes:
        adapted: adapters are trained.
        samples: answers are drawn while it trains.
        keeps_layers: no layer is ever left out (``layer_keep`` is 1).
    """

    adapted: bool = False
    objective: str = "next_token"
    optimizer: str = "adamw"
    accumulate: int = 1
    samples: bool = False
    keeps_layers: bool = True


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason for refusing a run, and the setting that helps ``instead`` of another layout; empty if only a layout
    helps."""

    why: str
    instead: str = ""


def refusal(run: RunSettings, spread: Spread, model: ModelConfig | None = None) -> str | None:
    """Return the reason why a run cannot be distributed so, and the settings to use; None if it can.

    Args:
        model: the whole model; None if it is not known yet, which skips the rules about models.
    """
    reason = next(reasons(run, spread, model), None)
    if reason is None:
        return None
    found = nearest(run, spread, model)
    ways = [reason.instead] if reason.instead else []
    if found is not None:
        changes = _changes(spread, run, *found)
        ways += [changes] if changes not in ways else []
    return f"{reason.why}: set {', or '.join(ways)}" if ways else f"{reason.why}: no layout of this run can be trained"


def nearest(run: RunSettings, spread: Spread, model: ModelConfig | None = None) -> tuple[Spread, int] | None:
    """Find the layout that differs least from a refused one, with as many ranks if possible, and its ``accumulate``.
    Ties are broken by the order of ``AXES``: the usually faster axis comes first."""
    ranks = spread.ranks
    if ranks > MOST_RANKS:
        return None
    for size in range(ranks, 0, -1):
        best: tuple[float, Spread, int] | None = None
        for other in _layouts(size, spread):
            accumulate = -(-run.accumulate // other.data) * other.data
            far = _distance(spread, other) + 0.005 * (accumulate != run.accumulate)
            if best is not None and far >= best[0]:
                continue
            if next(reasons(replace(run, accumulate=accumulate), other, model), None) is None:
                best = far, other, accumulate
        if best is not None:
            return best[1], best[2]
    return None


def _layouts(ranks: int, like: Spread) -> Iterator[Spread]:
    """Yield all layouts of ``ranks`` ranks, with the other settings kept or turned off."""
    for data in _divisors(ranks):
        for pipeline in _divisors(ranks // data):
            for tensor in _divisors(ranks // data // pipeline):
                context = ranks // data // pipeline // tensor
                levels = (3,) if like.host_weights else range(4) if data > 1 else (0,)  # weights elsewhere are cut
                schedules: set[tuple[str, int]]
                schedules = {(like.schedule, like.chunks), ("1f1b", 1)} if pipeline > 1 else {("1f1b", 1)}
                for zero in levels:
                    for name, chunks in schedules:
                        for sequence in {like.sequence and tensor > 1, False}:
                            for expert in {like.expert and data > 1, False}:
                                for tiles in {like.tiles if zero == 3 else 1, 1}:
                                    yield replace(
                                        like, data=data, pipeline=pipeline, tensor=tensor, context=context, zero=zero,
                                        tiles=tiles, schedule=name, chunks=chunks, sequence=sequence, expert=expert,
                                    )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _distance(one: Spread, other: Spread) -> float:
    """Rate how much two layouts differ: one for each setting that changes, and a little for the size of the change."""
    far = 0.0
    for place, axis in enumerate(AXES):
        a, b = getattr(one, axis), getattr(other, axis)
        far += (1 + 0.1 * abs(math.log2(a / b)) + 0.01 * place * (b > a)) if a != b else 0
    far += 0.5 * (one.tiles != other.tiles)
    far += (one.zero != other.zero) + 0.1 * abs(one.zero - other.zero)
    far += 1.5 * (one.expert != other.expert)
    return far + sum(0.5 for name in ("schedule", "chunks", "sequence") if _of(one, name) != _of(other, name))


def _of(spread: Spread, name: str) -> object:
    return (spread.data if spread.expert else 1) if name == "expert" else getattr(spread, name)


def _changes(asked: Spread, run: RunSettings, found: Spread, accumulate: int) -> str:
    """Name the settings that lead to another layout."""
    parts = []
    for name in ("tensor", "context", "pipeline", "data", "expert", "zero", "tiles", "sequence", "schedule", "chunks"):
        before, now = _of(asked, name), _of(found, name)
        if name == "chunks" and found.chunks == 1:
            continue
        if before != now:
            parts.append(f"parallel.{name} to " + (f'"{now}"' if isinstance(now, str) else str(now).lower()))
    if accumulate != run.accumulate:
        parts.append(f"accumulate to {accumulate}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


# Rules, the plainest first


def reasons(run: RunSettings, spread: Spread, model: ModelConfig | None = None) -> Iterator[Reason]:
    """Yield every reason why a run cannot be distributed so."""
    yield from _of_steps(run, spread)
    yield from _of_what_is_trained(run, spread)
    yield from _of_optimizers(run, spread)
    if model is not None:
        yield from _of_experts(spread, model)
        yield from _of_heads(spread, model)
        yield from _of_layers(spread, model)


def _of_steps(run: RunSettings, spread: Spread) -> Iterator[Reason]:
    if run.accumulate % spread.data:
        enough = -(-run.accumulate // spread.data) * spread.data
        why = f"a step has {run.accumulate} micro-batches, which {spread.data} ranks cannot share evenly"
        yield Reason(why, f"accumulate to {enough}")
    elif spread.pipeline > 1:
        try:
            check_schedule(spread.schedule, spread.pipeline, run.accumulate // spread.data, spread.chunks)
        except ValueError as error:
            why, _, number = str(error).partition(": take ")
            yield Reason(why, f"accumulate to {int(number) * spread.data}" if number else "")
    if spread.zero == 3 and spread.pipeline > 1:
        yield Reason("parallel.zero = 3 gathers layers again for every micro-batch of a pipeline")
    if not run.keeps_layers and (spread.zero == 3 or spread.pipeline > 1):
        what = "zero = 3" if spread.zero == 3 else "pipeline"
        yield Reason(f"layer_keep leaves layers out, and parallel.{what} runs each in its turn", "layer_keep to 1")


def _of_what_is_trained(run: RunSettings, spread: Spread) -> Iterator[Reason]:
    if run.objective == "grpo" and spread.ranks > 1:
        yield Reason('objective = "grpo" draws its answers on one device')
    for name in ("tensor", "pipeline", "expert"):
        if _of(spread, name) == 1:
            continue
        what = f"parallel.{name} = {_of(spread, name)}"
        if run.adapted:
            yield Reason(f"{what} is for runs that train all weights, and adapters stand beside whole ones")
        if run.objective != "next_token":
            yield Reason(f'{what} is for objective = "next_token", not {run.objective!r}')
        if run.samples:
            yield Reason(f"samples are drawn from a whole model, and {what} cuts it")
    if spread.context > 1 and run.objective != "next_token":
        yield Reason(f'parallel.context = {spread.context} is for objective = "next_token", not {run.objective!r}')
    if spread.context > 1 and run.samples:
        yield Reason("samples are drawn by one rank, and parallel.context shares tokens")
    if spread.zero == 3 and run.adapted:
        yield Reason("parallel.zero = 3 is for runs that train all weights, not for adapters")
    if spread.zero == 3 and run.samples and spread.data > 1:
        yield Reason("samples are drawn from a whole model, and parallel.zero = 3 cuts it")


def _of_optimizers(run: RunSettings, spread: Spread) -> Iterator[Reason]:
    name = f'optimizer.name = "{run.optimizer}"'
    for axis in ("tensor", "pipeline", "expert"):
        if _of(spread, axis) != 1 and run.optimizer != "adamw":
            what = f"parallel.{axis} = {_of(spread, axis)} updates parts of matrices"
            yield Reason(f"{what}, which {name} cannot", 'optimizer.name to "adamw"')
    if run.optimizer in ONE_BIT and spread.zero > 1:
        yield Reason(f"{name} needs the whole gradient on every rank, and parallel.zero = {spread.zero} cuts it")
    elif run.optimizer == "zero_one_adam" and spread.zero:
        why = f"{name} steps on every rank by itself, and parallel.zero = 1 cuts its state"
        yield Reason(why, 'optimizer.name to "onebit_adam"')
    elif spread.zero == 3 and run.optimizer != "adamw":
        why = f"parallel.zero = 3 updates pieces of matrices, which {name} cannot"
        yield Reason(why, 'optimizer.name to "adamw"')


def _of_experts(spread: Spread, model: ModelConfig) -> Iterator[Reason]:
    if spread.expert:
        if model.moe is None:
            yield Reason("parallel.expert is for models with experts")
        elif model.moe.experts % spread.data:
            yield Reason(f"{model.moe.experts} experts cannot be shared by {spread.data} ranks")
        if spread.ranks > spread.data:
            yield Reason("parallel.expert is between ranks of parallel.data alone")
        if spread.zero:
            yield Reason(
                f"parallel.expert leaves each expert on one rank, and parallel.zero = {spread.zero} cuts states"
            )
    if model.moe is None:
        return
    if spread.tiles > 1:
        yield Reason("matrices of experts do not come in tiles", "parallel.tiles to 1")
    if spread.tensor > 1:
        yield Reason("a model with experts is not cut between ranks for training")
    if spread.pipeline > 1:
        yield Reason("a model with experts is not cut into stages for training")
    if spread.context > 1:
        yield Reason("routers of a model with experts see whole micro-batches, and parallel.context cuts these")


def _of_heads(spread: Spread, model: ModelConfig) -> Iterator[Reason]:
    ranks = spread.tensor
    if ranks > 1:
        if model.n_kv_heads % ranks:
            yield Reason(f"{model.n_kv_heads} key heads cannot be cut for {ranks} ranks")
        try:
            model.local(ranks)
        except ValueError:
            yield Reason(
                f"{model.n_heads} heads and {model.ffn_dim} feed-forward units cannot be cut for {ranks} ranks"
            )
        if model.vocab_size < ranks:
            yield Reason(f"a vocabulary of {model.vocab_size} tokens cannot be cut for {ranks} ranks")
        if model.qk_norm_whole or model.attention_sinks:
            odd = "norms of queries over all heads" if model.qk_norm_whole else "attention sinks"
            yield Reason(f"a model with {odd} is not cut between ranks for training")
    if spread.context > 1 and (model.plain_attention or model.attention_temperature is not None):
        yield Reason("ring attention does not support caps on scores, attention sinks or chunks")


def _of_layers(spread: Spread, model: ModelConfig) -> Iterator[Reason]:
    runs = spread.pipeline * spread.chunks
    if spread.pipeline > 1 and runs > model.n_layers:
        most = model.n_layers // spread.pipeline
        instead = f"parallel.chunks to {most}" if spread.chunks > 1 and most > 1 else ""
        yield Reason(f"the model has {model.n_layers} layers, which cannot be cut into {runs} runs", instead)
