"""The memory of a training step, term by term and moment by moment, before anything is allocated.

What is there all the time: weights, float32 master weights, the optimizer's state. What comes and goes: activations
(``kept.py``), which are most at the end of the forward pass; gradients, which take their place from the last layer on;
the loss's chunk of logits; what an operator or the optimizer needs only while it runs. The peak is the worst moment.

On a GPU it is what the allocator's own peak shows. On a CPU the process holds its code and torch's buffers besides, and
a checkpoint on its way to the disk is a second copy of the state; windows of attention make masks that are not counted.

Shapes: T tokens of a micro-batch, D model dim, F ffn dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..config import ModelConfig
from ..shapes import largest_matrix, linear_shapes, weight_shapes
from ..storage import int4_format, nf4_format
from .kept import Backend, Kept, LayerKept, Reads, layer_kept, outside_layers
from .merged import MergedKept, matrix_numbers, merged_kept
from .terms import Estimate, Phase, Term, gib

Task = Literal["pretrain", "finetune", "lora", "qlora"]
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
LOSS_CHUNK = 1024
"""Tokens whose logits the fused loss holds on a GPU; twice as many for narrow models (``ops/linear_cross_entropy``)."""
LOSS_ELEMENTS = 2**23
"""Logits that the loss in torch holds (``ops/linear_cross_entropy_torch``), and log-probabilities (``train/``)."""
DISTILLATION_PARTS = 4
"""So many times fewer rows of logits exist at once in a distillation (``train/divergence``)."""
CUBLAS_WORKSPACE = 32 * 2**20
"""What torch gives to cuBLAS on Hopper, once for each of the two threads that multiply (forward, backward)."""
MARGIN = {"gpu": 0.05, "cpu": 0.10}
"""Share of the peak that must be free beside it."""
FIXED_MARGIN = 256 * 2**20
WIDE = 2**22
"""Elements of a 16-bit parameter that AdamW holds in float32 at a time, where it is not one kernel."""
SMALL_PARAMETER, BLOCK, CHUNK = 4096, 256, 2**14
"""The 8-bit optimizer: below this a parameter has float32 moments; numbers that share a scale; blocks at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A way to train. Names and meanings are those of the training configuration.

    Attributes:
        micro_batch: tokens of one forward pass.
        accumulate: micro-batches to a step: with more than one, gradients are there during the next forward pass.
        rollouts: tokens that the paged cache of ``grpo`` holds while it draws answers.
        reference: what is trained is kept a second time, as it was when the run began.
        teacher: numbers of the frozen model that is distilled.
        backend: ``gpu`` (the Triton kernels) or ``cpu`` (plain torch).
        merged: on a GPU, each layer is one node (``merged.py``).
        whole: so many layers, the last ones, keep everything whatever ``checkpointing`` says; with ``merged`` alone.
        targets: last parts of the names of what has an adapter: matrices of the layers, ``embed``, ``head``.
        base_format, group: of the frozen base of ``qlora``.
        saved: weights that are trained whole beside adapters, by canonical name without ``.weight``.
    """

    task: Task = "finetune"
    objective: Literal["next_token", "dpo", "kto", "orpo", "grpo", "distill"] = "next_token"
    precision: Literal["float32", "bfloat16", "mixed"] = "float32"
    optimizer: Literal["adamw", "adamw8bit", "lamb", "muon"] = "adamw"
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
    base_format: Literal["int4", "nf4"] = "int4"

    @property
    def trains_head(self) -> bool:
        """Whether the matrix that gives the logits has a gradient."""
        return not self.adapted or "head" in self.targets or bool({"embed", "head"} & set(self.saved))

    @property
    def element(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.precision == "float32" else 2

    @property
    def master(self) -> bool:
        """Whether the optimizer has float32 copies of what is trained: with mixed precision, and of adapters."""
        return self.precision == "mixed" or (self.adapted and self.element < 4)

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained and the model is frozen."""
        return self.task in ("lora", "qlora")

    def reads(self, config: ModelConfig) -> Reads:
        """Whose gradient needs its input."""
        return Reads.adapters(config, self.targets, self.rank) if self.adapted else Reads.everything(config)


def trained_shapes(config: ModelConfig, plan: TrainingPlan) -> dict[str, tuple[int, ...]]:
    """What is trained, by name."""
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


def state_bytes(name: str, shape: tuple[int, ...], plan: TrainingPlan) -> int:
    """What the optimizer keeps for one parameter, its master copy not counted."""
    size = math.prod(shape)
    each = 4 if plan.master else plan.element
    if plan.optimizer == "adamw8bit":
        return 8 * size if size < SMALL_PARAMETER else -(-size // BLOCK) * (2 * BLOCK + 8)
    if plan.optimizer == "muon" and _by_muon(name, shape):
        return each * size
    return 2 * each * size


def step_bytes(name: str, shape: tuple[int, ...], plan: TrainingPlan) -> int:
    """What the optimizer needs beside the state while it changes one parameter."""
    size = math.prod(shape)
    master = plan.master
    each = 4 if master else plan.element
    if plan.optimizer == "adamw" and plan.backend == "gpu":
        return 0  # one kernel over all of them
    wide_gradient = 4 * size if master else 0
    if plan.optimizer == "adamw8bit" and size >= SMALL_PARAMETER:
        # both moments, weight and gradient in float32, and two more to encode
        return 24 * min(size, CHUNK * BLOCK) + wide_gradient
    if plan.optimizer == "lamb" and len(shape) >= 2:  # the step, and in 16 bits weight, gradient and moments
        return (4 if each == 4 else 20) * size + wide_gradient
    if plan.optimizer == "muon" and _by_muon(name, shape):
        product = 2 if plan.backend == "gpu" else 4
        return each * size + 4 * product * size + 4 * product * min(shape) ** 2 + wide_gradient
    if each < 4:  # weight, gradient, both moments and the root of v in float32, a part at a time
        return 20 * min(size, WIDE)
    return each * size + wide_gradient  # the root of v


def training(config: ModelConfig, plan: TrainingPlan) -> Estimate:
    """The account of ``plan`` for a model."""
    return _Account(config, plan).estimate()


class _Account:
    """Collects terms, then phases."""

    def __init__(self, config: ModelConfig, plan: TrainingPlan) -> None:
        self.config, self.plan = config, plan
        self.e = plan.element
        self.trained = trained_shapes(config, plan)
        self.reads = plan.reads(config)
        self.sums = 4 * _count(self.trained) if plan.accumulate > 1 and self.e < 4 else 0
        """Gradients of 16 bits are added up in float32."""
        self.terms: list[Term] = []
        checkpointed = config.n_layers - plan.whole
        self.plans: list[Kept] = [*[plan.checkpointing] * checkpointed, *["none"] * plan.whole]  # type: ignore[list-item]
        self.layers: list[LayerKept | MergedKept]
        if plan.merged:
            rank = plan.rank if plan.adapted else 0
            self.layers = [merged_kept(config, plan.targets, rank, self.e)] * config.n_layers
            self.beside, self.largest = matrix_numbers(config, plan.targets, rank)
        else:
            rest = layer_kept(config, self.reads, self.e, plan.backend)
            start = layer_kept(config, self.reads, self.e, plan.backend, first=True)
            self.layers = [start, *[rest] * (config.n_layers - 1)]
        self.outside = outside_layers(config, self.reads, self.e, plan.backend)
        self.table = self.e * config.vocab_size * config.dim

    def term(self, name: str, size: float, why: str) -> int:
        self.terms.append(Term(name, int(size), why))
        return int(size)

    def estimate(self) -> Estimate:
        plan = self.plan
        static = self.static()
        whole_gradient = self.gradient_bytes("")
        self.term(
            "gradients",
            whole_gradient,
            f"{_count(self.trained)} trained numbers of {self.e} bytes; all of them exist when the optimizer steps",
        )
        if self.sums:
            self.term("gradient sums", self.sums, "float32, over the micro-batches of a step")
        earlier = {"gradients": self.sums or whole_gradient} if plan.accumulate > 1 else {}
        kept = self.kept_bytes(self.config.n_layers)
        self.term("activations", kept, self.why_kept())
        phases = [*self.loading(), Phase("before the first step", static)]
        if plan.rollouts:
            cache = 2 * self.config.n_layers * self.config.kv_dim * self.e * plan.rollouts
            self.term("rollout KV cache", cache, f"{plan.rollouts} tokens of keys and values while answers are drawn")
            phases.append(Phase("drawing answers", {**static, "rollout KV cache": cache}))
        hidden = self.e * plan.micro_batch * self.config.dim
        forward, backward, why = self.loss_bytes()
        self.term("loss", max(forward, backward), why)
        alive = {**static, **earlier, "activations": kept}
        phases.append(Phase("end of the forward pass", {**alive, "loss": forward + hidden}))
        phases.append(Phase("backward of the loss", {**alive, "loss": backward}))
        worst = self.worst_layer(static)
        self.term("backward temporaries", worst.held["backward temporaries"], self.why_temporaries())
        phases += [worst, self.end_of_backward(static)]
        largest = max(self.trained, key=lambda name: step_bytes(name, self.trained[name], plan))
        step = step_bytes(largest, self.trained[largest], plan)
        self.term(
            "optimizer temporaries",
            step,
            f"{plan.optimizer} at its largest parameter, {largest}" if step else "one kernel changes all in place",
        )
        held = {**static, "gradients": self.sums or whole_gradient, "optimizer temporaries": step}
        phases.append(Phase("optimizer step", held))
        if plan.backend == "cpu":
            copy = static["weights"] + static["optimizer state"] + static["master weights"]
            self.term("checkpoint", copy, "a copy of weights and state, until it is on the disk")
            phases.append(Phase("checkpoint", {**static, "checkpoint": copy}))
        peak = max(phase.bytes for phase in phases)
        share = MARGIN[plan.backend]
        margin = Term(
            "margin", int(share * peak) + FIXED_MARGIN, f"{share:.0%} and {gib(FIXED_MARGIN)}: pages partly used"
        )
        return Estimate(tuple(self.terms), tuple(phases), margin)

    # ---- there all the time ------------------------------------------------------------------------------------------

    def static(self) -> dict[str, int]:
        config, plan, e = self.config, self.plan, self.e
        shapes = weight_shapes(config)
        linear = {n: s for n, s in shapes.items() if len(s) == 2 and n.startswith("layers.")}
        frozen = "frozen, " if plan.adapted else ""
        held = {}
        if plan.task == "qlora":
            numbers, rest = _count(linear), _count(shapes) - _count(linear)
            base = nf4_format() if plan.base_format == "nf4" else int4_format(plan.group, 8 * e)
            packed = int(base.bytes(numbers)) + e * rest
            how = "in NF4" if plan.base_format == "nf4" else f"in 4 bits with scale and zero for each {plan.group}"
            why = f"frozen, {numbers} numbers {how}, {rest} of {e} bytes"
        else:
            packed, why = e * _count(shapes), f"{frozen}{_count(shapes)} numbers of {e} bytes"
        beside = {name: shape for name, shape in self.trained.items() if not name.endswith(".weight")}
        adapters = e * _count(beside) if plan.adapted else 0
        if adapters and plan.merged and plan.task != "qlora":
            adapters += e * self.beside * config.n_layers  # they have a second place, beside the weights
        if adapters:
            why += f"; adapters {gib(adapters)}"
        held["weights"] = self.term("weights", packed + adapters, why)
        master = 4 * _count(self.trained) if plan.master else 0
        held["master weights"] = self.term("master weights", master, "float32 copies of what is trained")
        state = sum(state_bytes(name, shape, plan) for name, shape in self.trained.items())
        held["optimizer state"] = self.term("optimizer state", state, f"{plan.optimizer}: {_STATE[plan.optimizer]}")
        if plan.reference:
            why = "what is trained, as it was when the run began"
            held["reference"] = self.term("reference", e * _count(self.trained), why)
        if plan.teacher:
            held["teacher"] = self.term("teacher", e * plan.teacher, f"frozen, {plan.teacher} numbers of {e} bytes")
        batch = 24 * plan.micro_batch * plan.accumulate
        held["batch"] = self.term("batch", batch, "tokens, labels and positions of all micro-batches")
        others = plan.adapted or plan.merged or plan.objective != "next_token" or plan.optimizer == "muon"
        if plan.backend == "gpu" and others:
            space, why = 2 * CUBLAS_WORKSPACE, "cuBLAS, for the thread of each direction"
            if plan.merged and plan.task == "qlora":
                space += e * self.largest
                why += "; one 4-bit product made dense"
            held["workspace"] = self.term("workspace", space, why)
        return held

    def loading(self) -> list[Phase]:
        """The base of ``qlora`` is loaded whole and quantized matrix by matrix."""
        if self.plan.task != "qlora":
            return []
        whole = self.e * _count(weight_shapes(self.config))
        largest = largest_matrix(self.config)
        quantizing = self.term("quantizing", 13 * largest, "the largest matrix in float32, its codes twice more")
        return [Phase("loading and quantizing", {"weights": whole, "quantizing": quantizing})]

    # ---- activations -------------------------------------------------------------------------------------------------

    def kept_bytes(self, layers: int) -> int:
        """Activations held when the backward pass has ``layers`` layers to go."""
        plan = self.plan
        each = [layer.under(kept) for layer, kept in zip(self.layers[:layers], self.plans, strict=False)]
        return int(plan.micro_batch * (self.outside + sum(each)))

    def why_kept(self) -> str:
        last, plan = self.layers[-1], self.plan
        each = last.under(plan.checkpointing)
        if plan.whole:
            others = self.config.n_layers - plan.whole
            return (
                f"{plan.micro_batch} tokens x ({others} layers x {each:.0f} bytes, checkpointing {plan.checkpointing}, "
                f"and {plan.whole} x {last.under('none'):.0f} without)"
            )
        return (
            f"{plan.micro_batch} tokens x {self.config.n_layers} layers x {each:.0f} bytes, checkpointing "
            f"{plan.checkpointing}" + ("" if plan.checkpointing == "none" else f" ({last.under('none'):.0f} without)")
        )

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def gradient_bytes(self, prefix: str) -> int:
        return self.e * _count({n: s for n, s in self.trained.items() if n.startswith(prefix)})

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def loss_bytes(self) -> tuple[int, int, str]:
        """(forward, backward, why): what the loss holds at the end of the one and at the start of the other."""
        config, plan, e = self.config, self.plan, self.e
        wide, vocab = 4, config.vocab_size
        dx = e * plan.micro_batch * config.dim
        numbers = vocab * config.dim if plan.trains_head else 0
        rows = min(plan.micro_batch, max(1, LOSS_ELEMENTS // vocab))
        half = e if e < wide else 0
        before = wide + half if rows < plan.micro_batch else 0  # the part before is there until the next is made
        if plan.objective == "distill":
            rows = min(plan.micro_batch, max(1, LOSS_ELEMENTS // vocab // DISTILLATION_PARTS))
            made = dx + numbers * (wide + (e if half else 0))
            why = (
                f"logits of {rows} tokens of both models at a time, and the gradients dx and dW that are made with them"
            )
            return made + rows * vocab * 7 * wide, 2 * (dx + e * numbers), why
        if plan.objective != "next_token":
            forward = rows * vocab * (half + 2 * wide)
            backward = dx + numbers * (wide + e) + rows * vocab * (half + wide + before)
            return forward, backward, f"log-probabilities, logits of {rows} tokens at a time, gradients dx and dW"
        if plan.backend == "gpu":
            chunk = min(plan.micro_batch, LOSS_CHUNK * (1 if config.dim >= 4096 else 2))
            made = dx + e * numbers
            why = f"logits of {chunk} tokens at a time, and the gradients dx and dW that are made with them"
            return made + e * chunk * vocab, made, why
        if e == 4:  # the C++ kernels: one buffer of logits becomes its own gradient
            parts = max(1, -(-plan.micro_batch * vocab // LOSS_ELEMENTS))
            rows = -(-plan.micro_batch // parts)
            made = dx + wide * numbers
            why = f"logits of {rows} tokens at a time, in place, dx and dW"
            return made + rows * (vocab + config.dim) * wide, 2 * made, why
        chunk_bytes = rows * vocab * (half + 2 * wide + before)
        forward = dx + numbers * wide + max(chunk_bytes, numbers * e)
        return forward, 2 * (dx + e * numbers), f"logits of {rows} tokens at a time, dx and dW in float32"

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def worst_layer(self, static: dict[str, int]) -> Phase:
        """The worst moment of the backward passes of all layers: inside an MLP or inside an attention."""
        config, plan = self.config, self.plan
        tokens = plan.micro_batch
        # The head's gradient is there, and that of the final norm.
        above = self.gradient_bytes("head.") + self.gradient_bytes("norm.")
        if config.tied_embeddings and plan.trains_head:
            above += self.table
        phases = []
        for layer in range(config.n_layers - 1, -1, -1):
            kept = self.layers[layer]
            prefix = f"layers.{layer}."
            down = self.gradient_bytes(f"{prefix}mlp.down")
            half = self.gradient_bytes(f"{prefix}mlp")
            again = int(tokens * kept.again(self.plans[layer]))
            base = self.kept_bytes(layer + 1) + again
            if isinstance(kept, MergedKept):  # the node holds all it kept until it is done
                done, in_mlp, in_attention = 0, int(tokens * kept.mlp), int(tokens * kept.attention)
            else:
                done = int(tokens * kept.mlp)
                in_mlp, in_attention = self.mlp_temporaries(kept), self.attention_temporaries()
            inside = (
                (f"backward of layer {layer}, MLP", base, above + down, in_mlp),
                (f"backward of layer {layer}, attention", base - done, above + half, in_attention),
            )
            for name, activations, gradients, temporaries in inside:
                whole = self.gradient_bytes("") if plan.accumulate > 1 and not self.sums else gradients + self.sums
                held = {"activations": activations, "gradients": whole, "backward temporaries": temporaries}
                phases.append(Phase(name, {**static, **held}))
            above += self.gradient_bytes(prefix)
        return max(phases, key=lambda phase: phase.bytes)

    def mlp_temporaries(self, kept: LayerKept) -> int:
        """Held on top of an MLP's activations at the worst moment of its gradient."""
        config, plan, e = self.config, self.plan, self.e
        tokens, wide = plan.micro_batch, max(4, self.e)
        ffn = config.widest_mlp
        stream = e * config.dim * tokens
        if plan.backend == "cpu" and (e != 4 or not config.gated_mlp):
            # Upstream gradient, and that of each factor, in float32.
            at_gate = tokens * ffn * (wide * (4 if config.gated_mlp else 3) - e * self.reads.down)
        else:
            at_gate = tokens * ffn * e * ((3 if config.gated_mlp else 2) - self.reads.down)
        at_down = e * tokens * ffn * (2 if plan.adapted else 1) + self.dense_weight()
        return int(stream + max(at_gate, at_down))

    def attention_temporaries(self) -> int:
        config, plan, e = self.config, self.plan, self.e
        sums = 4 * config.q_dim + 8 * config.n_heads if plan.backend == "gpu" else 0  # float32 sums of dq
        if plan.backend == "cpu" and e == 4:  # dk and dv of every query head
            sums = 8 * config.q_dim
        each = e * (config.dim + 2 * config.q_dim + 2 * config.kv_dim) + sums
        return int(each * plan.micro_batch + self.dense_weight())

    def dense_weight(self) -> int:
        """A 4-bit weight made dense, the largest."""
        if self.plan.task != "qlora":
            return 0
        size = largest_matrix(self.config)
        return size * (self.e if self.plan.backend == "gpu" else max(8, 2 * self.e))

    def why_temporaries(self) -> str:
        what = "gradients of one part of a layer on their way"
        return what + (", and one 4-bit weight made dense" if self.plan.task == "qlora" else "")

    def end_of_backward(self, static: dict[str, int]) -> Phase:
        """All gradients are there; with tied embeddings the table has two, which are added."""
        second = self.table if self.plan.trains_head and self._table_has_two else 0
        stream = self.e * self.plan.micro_batch * self.config.dim
        held = {"gradients": self.gradient_bytes("") + self.sums, "backward temporaries": second + stream}
        return Phase("end of the backward pass", {**static, **held})

    @property
    def _table_has_two(self) -> bool:
        return self.config.tied_embeddings or self.plan.accumulate > 1


_STATE = {
    "adamw": "two moments for each trained number",
    "adamw8bit": "two moments of 8 bits, a scale for each 256",
    "lamb": "two moments for each trained number",
    "muon": "one momentum for the matrices of the layers, two moments for the rest",
}


def _by_muon(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and "layers." in name and "router" not in name and "experts_" not in name


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
