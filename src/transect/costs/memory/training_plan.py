"""``TrainingPlan``: a way to train, what it trains, and what its optimizer holds for each parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...spec.layouts.refusals import ONE_BIT, RunSettings
from ...spec.model import ModelConfig
from ...spec.numbers.int4 import GROUPS
from ...spec.numbers.registry import base_formats
from ...spec.weights import linear_shapes, weight_shapes
from .kept import Backend, Kept, Reads
from .sizes import MOMENT_BLOCK, MOMENT_BLOCKS, SMALL_PARAMETER, WIDE

Task = Literal["pretrain", "finetune", "lora", "qlora"]
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A way to train. Names and meanings are those of the training configuration.

    Attributes:
        micro_batch: tokens of one forward pass.
        accumulate: micro-batches to a step: with more than one, gradients are there during the next forward pass.
        rollouts: tokens that the paged cache of ``grpo`` holds while it draws answers.
        reference: the trained weights are kept a second time, as they were when the run began.
        teacher: numbers of the frozen model that is distilled.
        backend: ``gpu`` (the Triton kernels) or ``cpu`` (plain torch).
        merged: on a GPU, each layer is one node (``merged.py``).
        whole: number of last layers that keep everything in spite of ``checkpointing``; only with ``merged``.
        targets: last parts of the names of matrices with an adapter: of the layers, ``embed``, ``head``.
        base_format, group: of the frozen base of ``qlora``.
        saved: weights that are trained whole beside adapters, by canonical name without ``.weight``.
    """

    task: Task = "finetune"
    objective: str = "next_token"
    precision: Literal["float32", "bfloat16", "mixed"] = "float32"
    optimizer: Literal["adamw", "adamw8bit", "lamb", "muon", "onebit_adam", "onebit_lamb", "zero_one_adam"] = "adamw"
    checkpointing: Kept = "none"
    seq_len: int = 1024
    micro_batch: int = 4096
    accumulate: int = 1
    rank: int = 16
    targets: tuple[str, ...] = TARGETS
    group: int = 64
    rollouts: int = 0
    reference: bool = False
    teacher: int = 0
    backend: Backend = "gpu"
    merged: bool = False
    whole: int = 0
    saved: tuple[str, ...] = ()
    base_format: str = "int4"

    @property
    def trains_head(self) -> bool:
        """True if the head's matrix has a gradient."""
        return not self.adapted or "head" in self.targets or bool({"embed", "head"} & set(self.saved))

    @property
    def element(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.precision == "float32" else 2

    @property
    def master(self) -> bool:
        """True if the optimizer has float32 copies of trained weights: with mixed precision, and of adapters."""
        return self.precision == "mixed" or (self.adapted and self.element < 4)

    @property
    def adapted(self) -> bool:
        """True if adapters are trained and the model is frozen."""
        return self.task in ("lora", "qlora")

    @property
    def run(self) -> RunSettings:
        """Settings that determine how the run can be distributed over ranks."""
        return RunSettings(
            adapted=self.adapted, objective=self.objective, optimizer=self.optimizer, accumulate=self.accumulate
        )

    def reads(self, config: ModelConfig) -> Reads:
        """Return the matrices whose gradient needs their input."""
        return Reads.adapters(config, self.targets, self.rank) if self.adapted else Reads.everything(config)


def trained_shapes(config: ModelConfig, plan: TrainingPlan) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained parameters, by name."""
    if not plan.adapted:
        return weight_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(config.n_layers):
        for name, ((outputs, inputs), _) in linear_shapes(config, layer).items():
            if name.split(".")[1] in plan.targets:
                found[f"layers.{layer}.{name}.a"] = (plan.rank, inputs)
                found[f"layers.{layer}.{name}.b"] = (outputs, plan.rank)
    for name in {"embed", "head"} & set(plan.targets):
        found |= {f"{name}.a": (plan.rank, config.dim), f"{name}.b": (config.vocab_size, plan.rank)}
    shapes = weight_shapes(config)
    return found | {f"{name}.weight": shapes[f"{name}.weight"] for name in plan.saved}


def fitting_groups(config: ModelConfig) -> list[int]:
    """List the groups whose pairs divide the rows of all matrices of the layers."""
    return [group for group in GROUPS if not any(shape[1] % (2 * group) for _, shape in _packed_shapes(config))]


def _packed_shapes(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    return [shape for shape in weight_shapes(config).items() if len(shape[1]) == 2 and shape[0].startswith("layers.")]


def ungrouped_base() -> str:
    """Return the base format for rows of any length."""
    return next(name for name, form in base_formats().items() if form.base and not form.base.grouped)


def check_base(config: ModelConfig, plan: TrainingPlan) -> None:
    """Check that the frozen base of ``qlora`` can be held in its 4 bits.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    if plan.task != "qlora":
        return
    shapes = _packed_shapes(config)
    odd = next((name for name, shape in shapes if math.prod(shape) % 2), None)
    if odd is not None:
        raise ValueError(f'{odd} has an odd number of numbers, and two share a byte in 4 bits: set task to "lora"')
    base = base_formats()[plan.base_format].base
    if base is None or not base.grouped:
        return
    fitting = fitting_groups(config)
    if plan.group in fitting:
        return
    name, width = next(
        (name, shape[1]) for name, shape in shapes if plan.group not in GROUPS or shape[1] % (2 * plan.group)
    )
    known = f'lora.base_format to "{ungrouped_base()}"'
    if fitting:
        known = f"lora.group to {' or '.join(map(str, fitting))}"
    raise ValueError(
        f"rows of {width} numbers ({name}) cannot be cut into pairs of groups of lora.group = {plan.group}: set {known}"
    )


def state_bytes(name: str, shape: tuple[int, ...], plan: TrainingPlan) -> int:
    """Return the bytes of the optimizer's state of one parameter, without its master copy."""
    size = math.prod(shape)
    each = 4 if plan.master else plan.element
    if plan.optimizer == "adamw8bit":
        return 8 * size if size < SMALL_PARAMETER else -(-size // MOMENT_BLOCK) * (2 * MOMENT_BLOCK + 8)
    if plan.optimizer == "muon" and _by_muon(name, shape):
        return each * size
    if plan.optimizer == "onebit_lamb" and len(shape) >= 2:
        return 3 * each * size + 8
    return 2 * each * size


def step_bytes(name: str, shape: tuple[int, ...], plan: TrainingPlan) -> int:
    """Return the bytes that the optimizer needs beside the state while it updates one parameter."""
    size = math.prod(shape)
    master = plan.master
    each = 4 if master else plan.element
    if plan.optimizer == "adamw" and plan.backend == "gpu":
        return 0  # one kernel over all of them
    wide_gradient = 4 * size if master else 0
    if plan.optimizer == "adamw8bit" and size >= SMALL_PARAMETER:
        # both moments, weight and gradient in float32, and two more to encode
        return 24 * min(size, MOMENT_BLOCKS * MOMENT_BLOCK) + wide_gradient
    if plan.optimizer in ONE_BIT:  # of one parameter in float32: weight, step, root; ``exchange_bytes`` has the rest
        return 20 * size
    if plan.optimizer == "lamb" and len(shape) >= 2:  # the step, and in 16 bits weight, gradient and moments
        return (4 if each == 4 else 20) * size + wide_gradient
    if plan.optimizer == "muon" and _by_muon(name, shape):
        product = 2 if plan.backend == "gpu" else 4
        return each * size + 4 * product * size + 4 * product * min(shape) ** 2 + wide_gradient
    if each < 4:  # weight, gradient, both moments and the root of v in float32, a part at a time
        return 20 * min(size, WIDE)
    return each * size + wide_gradient  # the root of v


def exchange_bytes(numbers: int, ranks: int, plan: TrainingPlan) -> tuple[int, int]:
    """Return the bytes of ranks that exchange signs, beside the states: permanent (momentum and compensation errors),
    and during the exchange (own momentum, messages sent and received)."""
    if plan.optimizer not in ONE_BIT:
        return 0, 0
    return (20 if plan.optimizer == "zero_one_adam" else 12) * numbers + 4 * numbers // ranks, 12 * numbers


def _by_muon(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and "layers." in name and "router" not in name and "experts_" not in name
