"""The memory of a training step, term by term and moment by moment, before anything is allocated.

What is there all the time: weights, float32 master weights, the optimizer's state. What comes and goes: activations
(``kept.py``), which are most at the end of the forward pass; gradients, which take their place from the last layer on;
the loss's chunk of logits; what an operator or the optimizer needs only while it runs. The peak is the worst moment.

On a GPU it is what the allocator's own peak shows, and memory that GPUs share. On a CPU the process holds its code and
torch's buffers besides, and a checkpoint on its way to the disk is a second copy of the state; windows of attention
make masks that are not counted.

Shapes: T tokens of a micro-batch, D model dim, F ffn dim, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...spec.model import ModelConfig
from ...spec.numbers.registry import base_formats
from ...spec.weights import largest_matrix
from ..units import gib
from .kept import Kept, LayerKept, layer_kept, outside_layers
from .merged import MergedKept, matrix_numbers, merged_kept
from .part import Gradients, RankPart, by_module, count, module_of
from .sizes import DISTILLATION_PARTS, LOSS_CHUNK, LOSS_ELEMENTS, RING_ROWS, SPLIT_ELEMENTS
from .terms import Estimate, Phase, Term
from .training_plan import TrainingPlan, check_base, exchange_bytes, state_bytes, step_bytes, trained_shapes

CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes that torch gives to cuBLAS on Hopper, once for each of the two threads that multiply (forward, backward)."""
MARGIN = {"gpu": 0.05, "cpu": 0.10}
"""Share of the peak that must be free beside it."""
FIXED_MARGIN = 256 * 2**20


def training(config: ModelConfig, plan: TrainingPlan, part: RankPart | None = None) -> Estimate:
    """Account for ``plan`` on one device, or on a rank that has a ``part`` of the model (``training_ranks.py``)."""
    return Account(plan, part or RankPart.whole(config)).estimate()


@dataclass(frozen=True, slots=True)
class Gathered:
    """Weights that are gathered temporarily, by term: between the layers' passes, during them, and after the last."""

    outside: dict[str, int]
    layers: dict[str, int]
    end: dict[str, int]


class Account:
    """Collects terms, then phases, of one rank."""

    def __init__(self, plan: TrainingPlan, part: RankPart) -> None:
        self.plan, self.part = plan, part
        config = self.config = part.config
        check_base(config, plan)
        self.e = plan.element
        self.tokens = -(-plan.micro_batch // part.context)
        """Tokens of a micro-batch that this rank computes."""
        self.narrow = config if not part.sequence else replace(config, dim=-(-config.dim // part.tensor))
        """Configuration for the norms of a rank that has fewer tokens of them, which take as much as norms with fewer
        columns."""
        self.trained = trained_shapes(config, plan) if plan.adapted else dict(part.shapes)
        self.modules = by_module(self.trained)
        self.gradients = Gradients(part, self.trained, self.e, plan.accumulate // part.data > 1)
        self.owned = {n: s for n, s in self.trained.items() if part.owned is None or n in part.owned}
        if part.zero == 3:
            self.owned = {name: (part.pieces(math.prod(shape)),) for name, shape in self.trained.items()}
        self.reads = plan.reads(config)
        self.terms: list[Term] = []
        checkpointed = config.n_layers - plan.whole
        self.plans: list[Kept] = [*[plan.checkpointing] * checkpointed, *["none"] * plan.whole]  # type: ignore[list-item]
        self.layers: list[LayerKept | MergedKept]
        if plan.merged:
            rank = plan.rank if plan.adapted else 0
            self.layers = [merged_kept(config, plan.targets, rank, self.e, self.narrow.dim)] * config.n_layers
            self.beside, self.largest = matrix_numbers(config, plan.targets, rank)
        else:
            rest = layer_kept(config, self.reads, self.e, plan.backend, stream=self.narrow.dim)
            start = layer_kept(config, self.reads, self.e, plan.backend, first=True, stream=self.narrow.dim)
            self.layers = [start, *[rest] * (config.n_layers - 1)]
        self.outside = outside_layers(self.narrow, self.reads, self.e, plan.backend)
        self.table = self.e * math.prod(part.shapes.get("embed.weight", (0,)))
        self.host: tuple[Term, ...] = ()

    def term(self, name: str, size: float, why: str) -> int:
        self.terms.append(Term(name, int(size), why))
        return int(size)

    def estimate(self) -> Estimate:
        plan, part, gradients = self.plan, self.part, self.gradients
        static = self.static()
        shown = self.e * gradients.numbers if part.alone else gradients.stepping
        if gradients.leave:
            shown = gradients.at_the_end
        self.term("gradients", shown, gradients.why)
        if gradients.on_host:
            why = "in the memory of the host, until the processor takes a step with them"
            self.host += (Term("gradients", gradients.on_host, why),)
        if gradients.sums:
            self.term("gradient sums", gradients.sums, "float32, over the micro-batches of a step")
        if part.sharing > 1 and gradients.at_the_end > gradients.stepping:
            self.term("buckets", gradients.at_the_end - gradients.stepping, "gradients on their way between ranks")
        earlier = {"gradients": gradients.waiting}
        gathered = self.gathered()
        kept = self.kept_bytes(self.config.n_layers)
        self.term("activations", kept, self.why_kept())
        phases = [*self.loading(), Phase("before the first step", static)]
        busy = dict(static)
        if part.in_flight > 1:
            why = f"of {part.in_flight - 1:g} micro-batches more, on their way through the stages"
            busy["activations in flight"] = self.term("activations in flight", (part.in_flight - 1) * kept, why)
        if plan.rollouts:
            cache = 2 * self.config.n_layers * self.config.kv_dim * self.e * plan.rollouts
            self.term("rollout KV cache", cache, f"{plan.rollouts} tokens of keys and values while answers are drawn")
            phases.append(Phase("drawing answers", {**static, "rollout KV cache": cache}))
        hidden = self.e * self.tokens * self.config.dim
        alive = {**busy, **earlier, "activations": kept, **gathered.outside}
        if part.last:
            forward, backward, why = self.loss_bytes()
            self.term("loss", max(forward, backward), why)
            phases.append(Phase("end of the forward pass", {**alive, "loss": forward + hidden}))
            phases.append(Phase("backward of the loss", {**alive, "loss": backward}))
        else:
            phases.append(Phase("end of the forward pass", {**alive, "loss": hidden}))
        worst = self.worst_layer({**busy, **gathered.layers})
        self.term("backward temporaries", worst.held["backward temporaries"], self.why_temporaries())
        phases += [worst, self.end_of_backward({**static, **gathered.end})]
        largest = max(self.owned, key=lambda name: step_bytes(name, self.owned[name], plan))
        step = 0 if part.host_state else step_bytes(largest, self.owned[largest], plan)
        self.term(
            "optimizer temporaries",
            step,
            f"{plan.optimizer} at its largest parameter, {largest}" if step else "one kernel changes all in place",
        )
        held = {**static, "gradients": gradients.stepping, "optimizer temporaries": step + self.exchanging}
        phases.append(Phase("optimizer step", held))
        if part.owned is not None:
            sent = self.term("weights on their way", self.e * gradients.bucket, "from the ranks that updated them")
            phases.append(Phase("weights are shared", {**static, "weights on their way": sent}))
        if plan.backend == "cpu":
            copy = static["weights"] + static["optimizer state"] + static["master weights"]
            self.term("checkpoint", copy, "a copy of weights and state, until it is on the disk")
            phases.append(Phase("checkpoint", {**static, "checkpoint": copy}))
        peak = max(phase.bytes for phase in phases)
        share = MARGIN[plan.backend]
        margin = Term(
            "margin", int(share * peak) + FIXED_MARGIN, f"{share:.0%} and {gib(FIXED_MARGIN)}: pages partly used"
        )
        return Estimate(tuple(self.terms), tuple(phases), margin, self.host)

    # ---- there all the time ------------------------------------------------------------------------------------------

    def static(self) -> dict[str, int]:
        config, plan, part, e = self.config, self.plan, self.part, self.e
        shapes = part.shapes
        linear = {n: s for n, s in shapes.items() if len(s) == 2 and n.startswith("layers.")}
        frozen = "frozen, " if plan.adapted else ""
        held = {}
        if plan.task == "qlora":
            numbers, rest = count(linear), count(shapes) - count(linear)
            base = base_formats()[plan.base_format].base
            assert base is not None
            packed = int(base.weight(plan.group, 8 * e).bytes(numbers)) + e * rest
            how = base.words.format(group=plan.group)
            why = f"frozen, {numbers} numbers {how}, {rest} of {e} bytes"
        elif part.zero == 3:
            packed, why = e * part.sharded, f"{part.sharded} of {count(shapes)} numbers, of {e} bytes"
        else:
            packed, why = e * count(shapes), f"{frozen}{count(shapes)} numbers of {e} bytes"
        beside = {name: shape for name, shape in self.trained.items() if not name.endswith(".weight")}
        adapters = e * count(beside) if plan.adapted else 0
        if adapters and plan.merged and plan.task != "qlora":
            adapters += e * self.beside * config.n_layers  # they have a second place, beside the weights
        if adapters:
            why += f"; adapters {gib(adapters)}"
        if part.host_weights:
            self.host += (Term("weights", packed, f"{why}; in the memory of the host"),)
            packed = 0
        held["weights"] = self.term("weights", packed + adapters, why)
        master = 4 * count(self.owned) if plan.master else 0
        state = sum(state_bytes(name, shape, plan) for name, shape in self.owned.items())
        cut = f", of a part of them: {part.sharing} ranks share it" if part.zero else ""
        about = (
            ("master weights", master, f"float32 copies of what is trained{cut}"),
            ("optimizer state", state, f"{plan.optimizer}: {_STATE[plan.optimizer]}{cut}"),
        )
        for name, size, reason in about:
            if part.host_state:
                self.host += (Term(name, size, f"{reason}; in the memory of the host"),)
            held[name] = self.term(name, 0 if part.host_state else size, reason)
        numbers = count(self.trained)
        exchange, self.exchanging = exchange_bytes(numbers, part.sharing, plan)
        if exchange:
            held["exchange"] = self.term("exchange", exchange, "float32 momentum, and errors that are owed")
        if part.shared:
            why = "memory that GPUs share, in which copy engines put gradients to be summed"
            held["shared memory"] = self.term("shared memory", part.shared, why)
        if plan.reference:
            why = "what is trained, as it was when the run began"
            held["reference"] = self.term("reference", e * count(self.trained), why)
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
        """Return the phases of loading: the base of ``qlora`` is loaded whole and quantized matrix by matrix; sharded
        weights are read, or built whole, and divided unit by unit."""
        if self.part.zero == 3:
            unit = max(self.part.outside, *self.part.layers)
            if self.part.host_weights:
                size = 2 * self.e * unit
                return [Phase("cutting", {"cutting": self.term("cutting", size, "the largest unit, and the piece")})]
            cutting = self.term("cutting", self.e * (unit + self.part.sharded), "pieces, and the largest unit twice")
            built = self.config.moe is not None or self.plan.objective != "next_token"
            held = {"weights": self.e * count(self.part.shapes)} if built else {}
            return [Phase("cutting", {**held, "cutting": cutting})]
        if self.plan.task != "qlora":
            return []
        whole = self.e * count(self.part.shapes)
        largest = largest_matrix(self.config)
        quantizing = self.term("quantizing", 13 * largest, "the largest matrix in float32, its codes twice more")
        return [Phase("loading and quantizing", {"weights": whole, "quantizing": quantizing})]

    def gathered(self) -> Gathered:
        """Return the gathered weights under zero 3: those outside the layers, from the forward to the end of the
        backward pass; and the running layer with the next one."""
        part = self.part
        if part.zero != 3:
            return Gathered({}, {}, {})
        outside = self.e * part.outside
        layers = self.e * (sum(sorted(part.layers)[-2:]) if part.tiles == 1 else 2 * part.tile)
        two = "layers" if part.tiles == 1 else "tiles of a matrix"
        why = f"embedding, last norm and head whole ({gib(outside)}), and two {two}"
        self.term("gathered", outside + layers, why)
        last = self.e * part.layers[-1] if self.plan.merged else 0  # it stays for its backward pass
        return Gathered({"gathered": outside + last}, {"gathered": outside + layers}, {"gathered": outside})

    # ---- activations -------------------------------------------------------------------------------------------------

    def kept_bytes(self, layers: int) -> int:
        """Count the activations held when the backward pass has ``layers`` layers to go."""
        each = [layer.under(kept) for layer, kept in zip(self.layers[:layers], self.plans, strict=False)]
        return int(self.tokens * (self.outside + sum(each)))

    def why_kept(self) -> str:
        last, plan = self.layers[-1], self.plan
        each = last.under(plan.checkpointing)
        if plan.whole:
            others = self.config.n_layers - plan.whole
            return (
                f"{self.tokens} tokens x ({others} layers x {each:.0f} bytes, checkpointing {plan.checkpointing}, "
                f"and {plan.whole} x {last.under('none'):.0f} without)"
            )
        return (
            f"{self.tokens} tokens x {self.config.n_layers} layers x {each:.0f} bytes, checkpointing "
            f"{plan.checkpointing}" + ("" if plan.checkpointing == "none" else f" ({last.under('none'):.0f} without)")
        )

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def loss_bytes(self) -> tuple[int, int, str]:
        """Return (forward, backward, reason): bytes of the loss at the end of the forward and at the start of the
        backward pass."""
        config, plan, e = self.config, self.plan, self.e
        wide, vocab = 4, self.part.vocabulary
        dx = e * self.tokens * config.dim
        numbers = vocab * config.dim if plan.trains_head else 0
        if self.part.tensor > 1:
            return self.split_loss_bytes(dx, numbers)
        rows = min(self.tokens, max(1, LOSS_ELEMENTS // vocab))
        half = e if e < wide else 0
        before = wide + half if rows < self.tokens else 0  # the part before is there until the next is made
        if plan.objective == "distill":
            rows = min(self.tokens, max(1, LOSS_ELEMENTS // vocab // DISTILLATION_PARTS))
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
            chunk = min(self.tokens, LOSS_CHUNK * (1 if config.dim >= 4096 else 2))
            made = dx + e * numbers
            why = f"logits of {chunk} tokens at a time, and the gradients dx and dW that are made with them"
            return made + e * chunk * vocab, made, why
        if e == 4:  # the C++ kernels: one buffer of logits becomes its own gradient
            parts = max(1, -(-self.tokens * vocab // LOSS_ELEMENTS))
            rows = -(-self.tokens // parts)
            made = dx + wide * numbers
            why = f"logits of {rows} tokens at a time, in place, dx and dW"
            return made + rows * (vocab + config.dim) * wide, 2 * made, why
        chunk_bytes = rows * vocab * (half + 2 * wide + before)
        forward = dx + numbers * wide + max(chunk_bytes, numbers * e)
        return forward, 2 * (dx + e * numbers), f"logits of {rows} tokens at a time, dx and dW in float32"

    def split_loss_bytes(self, dx: int, numbers: int) -> tuple[int, int, str]:
        """Return the bytes of the loss if each rank has some rows of the head: logits in float32, with their
        exponentials or their gradient; dW is summed in float32."""
        e, vocab = self.e, self.part.vocabulary
        rows = min(self.tokens, max(1, SPLIT_ELEMENTS[self.plan.backend] // vocab))
        chunk = 8 * rows * vocab
        product = e * numbers + (4 + (e if e < 4 else 0)) * rows * vocab
        why = f"logits of {rows} tokens at a time in float32, dx, and dW in float32"
        return dx + 4 * numbers + max(chunk, product), 2 * (dx + e * numbers), why

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def worst_layer(self, static: dict[str, int]) -> Phase:
        """Return the worst moment of the backward passes of all layers: inside an MLP or inside an attention."""
        config, tokens = self.config, self.tokens
        # The head's gradient is there, and that of the final norm.
        above = self.numbers("head.") + self.numbers("norm.")
        if config.tied_embeddings and self.plan.trains_head and self.part.last:
            above += self.table // self.e
        root = above
        phases = []
        for layer in range(config.n_layers - 1, -1, -1):
            kept = self.layers[layer]
            prefix = f"layers.{layer}."
            down = self.numbers(f"{prefix}mlp.down")
            half = self.numbers(f"{prefix}mlp")
            again = int(tokens * kept.again(self.plans[layer]))
            base = self.kept_bytes(layer + 1) + again
            if isinstance(kept, MergedKept):  # the node holds all it kept until it is done
                in_mlp, in_attention = int(tokens * kept.mlp), int(tokens * (kept.attention + self.ring))
                # What was computed again is forgotten before.
                done = 0 if self.plans[layer] == "none" else int(tokens * kept.dropped)
            else:
                done = int(tokens * kept.mlp)
                in_mlp, in_attention = self.mlp_temporaries(kept), self.attention_temporaries()
            inside = (
                (f"backward of layer {layer}, MLP", base, down, in_mlp),
                (f"backward of layer {layer}, attention", base - done, half, in_attention),
            )
            for name, activations, own, temporaries in inside:
                gradients = self.gradients.during(above, own, root)
                held = {"activations": activations, "gradients": gradients, "backward temporaries": temporaries}
                phases.append(Phase(name, {**static, **held}))
            if self.part.zero == 3 and self.part.tiles == 1:
                summed = self.gradients.during(above, self.part.layers[layer], root)
                held = {
                    "activations": self.kept_bytes(layer),
                    "gradients": summed + (self.part.reduce * self.part.layers[layer] if self.part.sharing > 1 else 0),
                    "backward temporaries": self.e * tokens * config.dim,
                }
                phases.append(Phase(f"gradients of layer {layer} are summed", {**static, **held}))
            above += self.numbers(prefix)
        return max(phases, key=lambda phase: phase.bytes)

    def mlp_temporaries(self, kept: LayerKept) -> int:
        """Count the temporaries at the worst moment of an MLP's gradient, beside its activations."""
        config, plan, e = self.config, self.plan, self.e
        tokens, wide = self.tokens, max(4, self.e)
        ffn = config.widest_mlp
        stream = e * config.dim * tokens
        if plan.backend == "cpu" and (e != 4 or not config.gated_mlp):
            # Upstream gradient, and that of each factor, in float32.
            at_gate = tokens * ffn * (wide * (4 if config.gated_mlp else 3) - e * self.reads.down)
        else:
            at_gate = tokens * ffn * e * ((3 if config.gated_mlp else 2) - self.reads.down)
        at_down = e * tokens * ffn * (2 if plan.adapted else 1) + self.dense_weight()
        if self.part.tiles > 1:  # it adds up in float32, over products of tiles
            at_down += (e + (4 if e < 4 else 0)) * tokens * ffn
        return int(stream + max(at_gate, at_down))

    @property
    def ring(self) -> int:
        """Count the bytes for each token if keys and values circulate: dq in float32, and tensors in transit, with
        gradients."""
        config = self.config
        return 4 * config.q_dim + (4 * self.e + 16) * config.kv_dim if self.part.context > 1 else 0

    def attention_temporaries(self) -> int:
        config, plan, e = self.config, self.plan, self.e
        sums = 4 * config.q_dim + 8 * config.n_heads if plan.backend == "gpu" else 0  # float32 sums of dq
        if plan.backend == "cpu" and e == 4:  # dk and dv of every query head
            sums = 8 * config.q_dim
        scores = 0
        if self.part.context > 1:
            sums = self.ring
        if self.part.context > 1 and plan.backend == "cpu":
            keys = min(plan.seq_len, -(-self.tokens // 2))
            scores = 12 * config.n_heads * min(RING_ROWS, keys) * keys
        each = e * (config.dim + 2 * config.q_dim + 2 * config.kv_dim) + sums
        return int(each * self.tokens + scores + self.dense_weight())

    def dense_weight(self) -> int:
        """Count the bytes of the largest 4-bit weight when made dense."""
        if self.plan.task != "qlora":
            return 0
        size = largest_matrix(self.config)
        return size * (self.e if self.plan.backend == "gpu" else max(8, 2 * self.e))

    def numbers(self, prefix: str) -> int:
        """Count the trained numbers of the parameters of one layer or module whose name begins with ``prefix``."""
        own = self.modules.get(module_of(prefix), {})
        return sum(size for name, size in own.items() if name.startswith(prefix))

    def why_temporaries(self) -> str:
        what = "gradients of one part of a layer on their way"
        return what + (", and one 4-bit weight made dense" if self.plan.task == "qlora" else "")

    def end_of_backward(self, static: dict[str, int]) -> Phase:
        """Return the end of the backward pass, when all gradients exist; with tied embeddings the table has two, which
        are added."""
        second = self.table if self.plan.trains_head and self._table_has_two else 0
        stream = self.e * self.tokens * self.config.dim
        held = {"gradients": self.gradients.at_the_end, "backward temporaries": second + stream}
        return Phase("end of the backward pass", {**static, **held})

    @property
    def _table_has_two(self) -> bool:
        return self.config.tied_embeddings or self.plan.accumulate > 1


_STATE = {
    "adamw": "two moments for each trained number",
    "adamw8bit": "two moments of 8 bits, a scale for each 256",
    "lamb": "two moments for each trained number",
    "onebit_adam": "two moments for each trained number",
    "onebit_lamb": "three moments for each number of a matrix, two for the rest",
    "zero_one_adam": "two moments for each trained number",
    "muon": "one momentum for the matrices of the layers, two moments for the rest",
}
