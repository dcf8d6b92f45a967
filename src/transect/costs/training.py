"""Seconds of a training step on each rank of a layout, by part, before it runs.

Operators are counted by ``model.py`` on the sizes that a rank has. Forward and backward of a product are three
products (two if the weight is frozen), of attention 3.5 times the forward pass; operators that only move bytes move
them three times. Each is divided by the rate of the machine and the share of it that training reaches. The rest is the
same for every layout: a rank steps the optimizer over the numbers that it owns, and exchanges messages along its axes.

Data ranks sum gradients while the backward pass runs, between GPUs of one host by copy engines, which slow it less.
What comes last, the embedding's bucket, has nothing beside it; with fused sums, where the head shares its table, only
rows of the tokens come last (``parallel/table_rows.py``). ZeRO 1 and 2 send weights after the step. ZeRO 3 gathers each
layer beside the one before, twice in a micro-batch.
Tensor ranks wait for their sums. Context ranks pass keys and values on beside attention, and wait for their
gradients; their attention is counted like that of one rank. The slowest stage of a pipeline waits for one micro-batch
of each other stage, v times less where each rank has v runs of layers (Narayanan et al. 2021, arXiv:2104.04473).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from ..spec.layouts.spread import Spread
from ..spec.model import ModelConfig
from ..spec.weights import linear_shapes
from .links import Axis, Traffic, beside
from .machine import Machine
from .memory.part import RankPart
from .memory.training_plan import TrainingPlan, trained_shapes
from .memory.training_ranks import check, for_rank, part_of
from .model import Row, step_cost
from .storage import Storage
from .work import visible_pairs

ROUNDS = 5
"""Newton-Schulz iterations of Muon, which ``train/optim/muon.py`` runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """Seconds of one step by part; they add up to the step.

    Attributes:
        compute: forward and backward pass, without what is computed twice.
        recompute: work that checkpointing repeats.
        gradients: copies and sums of gradients on the device, and their norm.
        communication: exposed, by ranks that wait.
        bubble: stages of a pipeline that have nothing to do.
        optimizer: the step of the optimizer.
        host: the steps of the processor, where states are on the host; gradients go there beside the backward pass, and
            weights come back beside the steps.
        hidden: communication beside other work; no part of the step.
        tokens: of the step, all ranks together.
    """

    compute: float
    recompute: float = 0.0
    gradients: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0
    hidden: float = 0.0
    tokens: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("hidden", "tokens")}

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in self.parts.items() if value >= 5e-5)
        return f"{1e3 * self.seconds:.1f} ms a step ({shown})"

    def to_dict(self) -> dict[str, float]:
        """Return the figures for JSON; seconds."""
        return {"seconds": self.seconds, "tokens_per_second": self.tokens_per_second, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro-batch on one stage."""

    forward: float
    backward: float
    again: float
    attention: float
    """Seconds of the forward pass of attention alone."""


def predict(config: ModelConfig, plan: TrainingPlan, spread: Spread, machine: Machine) -> TrainingStep:
    """Return the step of ``plan``, whose ``accumulate`` micro-batches the data ranks share. Documents are as long as
    may be.

    Raises:
        ValueError: the run cannot be spread so, or a rate of the machine is not known.
    """
    check(config, plan, spread)
    plan = for_rank(plan, spread)
    micro = plan.accumulate // spread.data
    stages = [part_of(config, plan, spread, stage) for stage in range(spread.pipeline)]
    passes = [_pass(part, plan, machine) for part in stages]
    slow = max(range(len(stages)), key=lambda i: passes[i].forward + passes[i].backward + passes[i].again)
    part, one = stages[slow], passes[slow]
    traffic = _layers(part, plan, spread, machine, one, micro) + _data(part, plan, spread, machine, one, micro)
    ends = _root(part, plan, spread, machine) if spread.zero == 3 else Traffic()
    traffic += ends * micro
    owned = _owned(part, plan)
    optimizer, host = _optimizer(part, plan, spread, machine, owned)
    # The slowest stage waits while the first micro-batch comes to it, and the last one goes back from it.
    others = sum(each.forward + each.backward + each.again for i, each in enumerate(passes) if i != slow)
    return TrainingStep(
        compute=micro * (one.forward + one.backward),
        recompute=micro * one.again,
        gradients=_gradients(part, plan, machine, micro, owned),
        communication=traffic.exposed,
        bubble=others / spread.chunks,
        optimizer=optimizer,
        host=host,
        hidden=traffic.hidden,
        tokens=plan.micro_batch * plan.accumulate,
    )


# ---- computing -------------------------------------------------------------------------------------------------------


def _pass(part: RankPart, plan: TrainingPlan, machine: Machine) -> Pass:
    config, bits, shares = part.config, 8 * plan.element, machine.shares
    length = min(plan.seq_len, plan.micro_batch)
    rows = [Row(length, length)] * (plan.micro_batch // length)
    if rest := plan.micro_batch % length:
        rows.append(Row(rest, rest))
    storage = Storage(linear=bits, embed=bits, head=bits, kv=bits, activation=bits)
    costs = step_cost(config, rows, storage=storage, logit_rows=plan.micro_batch if part.last else 0)
    rate = machine.ceilings.rate("bfloat16" if plan.element == 2 else "float32")
    products, attend = rate * shares.products * part.context, rate * shares.attention * part.context
    grouped = costs["grouped_linear"].flops if "grouped_linear" in costs else 0.0
    linear = (costs["linear"].flops + grouped) / products
    head = costs["head"].flops * part.vocabulary / config.vocab_size / products if part.last else 0.0
    attention = costs["paged_attention"].flops / attend
    moved = 6.0 * config.n_layers * plan.micro_batch * config.dim * plan.element  # two sums of the residual stream
    narrow = part.tensor if part.sequence else 1
    for name, cost in costs.items():
        if name in ("rms_norm", "layer_norm"):
            moved += cost.bytes / narrow
        elif name in ("rotary", "swiglu", "gelu", "expert_combine", "expert_order"):
            moved += cost.bytes
    moved /= part.context
    bytes_ = moved / machine.copies
    weights = 1 if plan.adapted else 2  # products of the backward pass
    again = 0.0
    inside = 1 - plan.whole / config.n_layers
    if plan.checkpointing == "full":
        again = inside * (linear + attention + bytes_)
    elif plan.checkpointing == "selective":
        again = inside * (linear * _share_of_first_mlp(config) + bytes_ / 2)
    table = math.prod(part.shapes.get("embed.weight", (0,)))
    embedding = 0.0 if plan.adapted else 3 * plan.element * table / machine.copies  # its gradient: zeros, sums
    return Pass(
        linear + head + attention + bytes_,
        weights * linear + (2 if plan.trains_head else 1) * head + 2.5 * attention + 2 * bytes_ + embedding,
        again,
        attention,
    )


def _share_of_first_mlp(config: ModelConfig) -> float:
    """Return the share of gate and up in a layer's products."""
    shapes = {name: math.prod(shape) for name, (shape, _) in linear_shapes(config).items()}
    return sum(n for name, n in shapes.items() if name.endswith(("gate", "up"))) / sum(shapes.values())


def _owned(part: RankPart, plan: TrainingPlan) -> int:
    """Count the numbers whose state the rank has."""
    trained = trained_shapes(part.config, plan) if plan.adapted else part.shapes
    if part.zero == 3:
        return part.sharded
    return sum(math.prod(shape) for name, shape in trained.items() if part.owned is None or name in part.owned)


def _trained(part: RankPart, plan: TrainingPlan) -> int:
    """Count the trained numbers among those that the rank computes with."""
    return sum(math.prod(s) for s in (trained_shapes(part.config, plan) if plan.adapted else part.shapes).values())


def _gradients(part: RankPart, plan: TrainingPlan, machine: Machine, micro: int, owned: int) -> float:
    """Estimate the time of sums over micro-batches in 16 bits, copies into buckets, and the norm."""
    numbers, e, moved = _trained(part, plan), plan.element, 0.0
    if micro > 1 and e < 4:
        moved += (micro - 1) * numbers * (e + 8)
    if part.sharing > 1:
        moved += (micro if part.zero == 3 else 1) * numbers * (e + part.reduce)
    moved += owned * (part.reduce if part.sharing > 1 else e)
    return moved / machine.copies


def _optimizer(part: RankPart, plan: TrainingPlan, spread: Spread, machine: Machine, owned: int) -> tuple[float, float]:
    """Estimate the seconds of the optimizer's step on the device, and on the host."""
    e = plan.element
    each = 4 if plan.master else e
    state = {"adamw8bit": 4}.get(plan.optimizer, 4 * each)
    moved = (part.reduce if part.sharing > 1 else e) + 2 * e + (8 if plan.master else 0) + state
    if spread.host_state:
        sharing = min(machine.per_host, spread.ranks)
        there = owned * 28 / (machine.host_memory_bytes_per_second / sharing)
        return 0.0, max(there, owned * e / machine.host_link)
    seconds = owned * moved / machine.copies
    if plan.optimizer == "muon":
        flops = 0.0
        for name, shape in part.shapes.items():
            if len(shape) == 2 and "layers." in name and (part.owned is None or name in part.owned):
                small, large = sorted(shape)
                flops += ROUNDS * (4 * small * small * large + 2 * small**3)
        seconds += flops / (machine.ceilings.rate("bfloat16") * machine.shares.products)
    return seconds, 0.0


# ---- between ranks ---------------------------------------------------------------------------------------------------


def _data(part: RankPart, plan: TrainingPlan, spread: Spread, machine: Machine, one: Pass, micro: int) -> Traffic:
    """Time the messages of data ranks: gradients, and weights that others have updated."""
    axis = _sharing(spread, machine)
    if axis.ranks == 1:
        return Traffic()
    e, r = plan.element, part.reduce
    copied = part.shared > 0 and axis.ranks * axis.stride <= machine.per_host
    if spread.zero == 3:
        found = Traffic()
        layers = part.config.n_layers
        numbers = max(part.layers)
        gather, sums = axis.gather(e * numbers), axis.gather(r * numbers)
        forward = beside(gather, one.forward / layers, machine, copied=copied)
        backward = beside(gather + sums, (one.backward + one.again) / layers, machine, copied=copied)
        for each, first in ((forward, gather), (backward, sums)):
            found += each * (layers - 1) + Traffic(first)
        return found * micro
    numbers = _trained(part, plan)
    table = math.prod(part.shapes.get("embed.weight", (0,)))
    apart = spread.fused and part.config.tied_embeddings and spread.tensor == spread.pipeline == 1
    last = min(numbers, 25 * 2**20 // 4 if plan.adapted or apart else max(25 * 2**20 // 4, table))
    buckets = max(1.0, 4 * numbers / (25 * 2**20))
    summed = axis.all_reduce if spread.zero < 2 else axis.send
    found = beside(summed(r * (numbers - last), buckets), one.backward, machine, copied=copied)
    found += Traffic(summed(r * last))
    if apart and not plan.adapted:
        rows = plan.micro_batch // spread.context * axis.ranks * part.config.dim
        found += Traffic(axis.gather(e * rows) if rows < table else axis.all_reduce(r * table))
    if spread.zero:
        found += Traffic(axis.send(e * numbers, buckets))
    return found


def _sharing(spread: Spread, machine: Machine) -> Axis:
    """Return the axis of ranks with the same weights. Stages are between data ranks, but not between context ranks."""
    stride = spread.tensor * (spread.pipeline if spread.data > 1 else 1)
    return Axis(machine, spread.data * spread.context, stride)


def _root(part: RankPart, plan: TrainingPlan, spread: Spread, machine: Machine) -> Traffic:
    """Time the messages of embedding, last norm and head under zero 3: gathered before the first layer, summed after
    the last."""
    axis = _sharing(spread, machine)
    seconds = axis.gather(plan.element * part.outside) + axis.gather(part.reduce * part.outside)
    return Traffic(seconds)


def _layers(part: RankPart, plan: TrainingPlan, spread: Spread, machine: Machine, one: Pass, micro: int) -> Traffic:
    """Time the messages of tensor, context and pipeline ranks in the passes of all micro-batches."""
    config, layers = part.config, part.config.n_layers
    stream = plan.element * config.dim * plan.micro_batch / spread.context
    found = Traffic()
    if spread.tensor > 1:
        axis = Axis(machine, spread.tensor)
        times = 4 + 2 * (plan.checkpointing == "full")
        seconds = axis.all_reduce(times * layers * stream, times * layers) + axis.all_reduce(2 * stream, 2)
        found += Traffic(seconds)
    if spread.context > 1:
        axis = Axis(machine, spread.context, spread.tensor)
        moves, keys = spread.context - 1, 2 * layers * config.kv_dim * plan.micro_batch / spread.context
        passed = axis.send(plan.element * moves * keys, layers * moves)
        found += beside(passed, one.attention, machine) + beside(passed, 2.5 * one.attention, machine)
        if plan.checkpointing == "full":
            found += beside(passed, one.attention, machine)
        found += Traffic(axis.send(4 * (moves + 1) * keys, layers * (moves + 1)))  # their gradients, float32
    if spread.pipeline > 1:
        axis = Axis(machine, 2, spread.tensor * spread.context)
        sent = 2 * stream / (spread.tensor if spread.sequence else 1)
        seconds = axis.send(spread.chunks * sent, 2 * spread.chunks)
        found += Traffic(seconds)
    return found * micro


# ---- useful FLOPs ----------------------------------------------------------------------------------------------------


class TrainingFlops:
    """Useful FLOPs of steps, for MFU: those that the mathematics needs, forward and backward, without recomputation.

    Source: Chowdhery et al. 2022, arXiv:2204.02311.

    The backward pass of a product is two products, one where the weight is frozen (adapters count as nothing); that of
    attention, which recomputes its scores, five products for two. The output head works on tokens with a label only,
    and a token sees its own document only.

    Args:
        config: of the model.
        frozen: the weights are not trained, adapters beside them are.
    """

    def __init__(self, config: ModelConfig, *, frozen: bool) -> None:
        one = step_cost(config, [Row(1, 1)], logit_rows=1)
        products = 2 if frozen else 3
        self._linear, self._head = products * one["linear"].flops, products * one["head"].flops
        self._pair = 3.5 * 4 * config.q_dim
        self._reaches = Counter(config.layer_reach(layer) for layer in range(config.n_layers))

    def __call__(self, lengths: Iterable[int], labels: int) -> float:
        """Count the FLOPs of documents of ``lengths`` tokens each, ``labels`` of whose tokens have a label."""
        counts = Counter(lengths)
        attended = sum(
            count * layers * visible_pairs(length, length, *reach)
            for length, count in counts.items()
            for reach, layers in self._reaches.items()
        )
        tokens = sum(length * count for length, count in counts.items())
        return tokens * self._linear + labels * self._head + attended * self._pair


def flops_per_token(config: ModelConfig, length: int, *, frozen: bool) -> float:
    """Count the FLOPs of one token with a label, in documents of ``length`` tokens, forward and backward."""
    return TrainingFlops(config, frozen=frozen)([length], length) / length
