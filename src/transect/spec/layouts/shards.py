"""``Shard``: the rows and columns of every weight, and the layers, that a rank has. Plain arithmetic, no torch.

Along the tensor axis, as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): q, k, v, gate and up are cut by their
outputs, o and down by their inputs, so that a layer needs two sums over the ranks. Key heads are repeated where there
are fewer than ranks. The embedding and the head are cut by the vocabulary. Norms, learned positions and the biases of o
and down are whole on every rank.

Experts are cut in the same way, each of them, and shared experts too. Or they are shared out (expert parallel): a rank
has some experts, whole. Routers are whole on every rank.

Along the pipeline axis each stage has a run of layers; the first has the embedding too, the last the norm and the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..model import ModelConfig
from ..weights import weight_shapes
from .ranks import RankLayout, share

ALL = slice(None)
ROWS, DRAWN = 16, 128
"""Divisors of a part of the vocabulary, except the last: as required by packed matrices; and by draws, if the parts
stay roughly equal."""

CUT_OUTPUTS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up", "mlp.shared_gate", "mlp.shared_up")
CUT_INPUTS = ("attention.o", "mlp.down", "mlp.shared_down")
CUT_HEADS = {"attention.sinks": False, "attention.q_norm": False, "attention.k_norm": True}
"""Weights with one number per head, or one per element of a head; True if their heads are key heads."""


class WeightPart(NamedTuple):
    """Rows and columns of a weight. ``stack``: number of matrices of equal size that the weight concatenates; ``rows``
    are the rows of each matrix."""

    rows: slice
    columns: slice
    stack: int = 1

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a weight of shape ``whole``."""
        rows = self.stack * len(range(whole[0] // self.stack)[self.rows])
        return (rows, *(len(range(size)[self.columns]) for size in whole[1:]))


def vocabulary_part(vocab_size: int, rank: int, ranks: int) -> slice:
    """Return the tokens that rank ``rank`` has of the embedding and the head; the last rank may have fewer.

    Raises:
        ValueError: there are more ranks than tokens.
    """
    if vocab_size < ranks:
        raise ValueError(f"a vocabulary of {vocab_size} tokens cannot be cut for {ranks} ranks")
    each = vocabulary_share(vocab_size, ranks)
    return slice(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


def vocabulary_share(vocab_size: int, ranks: int) -> int:
    """Return the most tokens that a rank has."""
    each = -(-vocab_size // (ranks * DRAWN)) * DRAWN
    if vocab_size - (ranks - 1) * each > each // 2:
        return each
    each = -(-vocab_size // (ranks * ROWS)) * ROWS
    return each if (ranks - 1) * each < vocab_size else -(-vocab_size // ranks)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of ``model`` that one rank has.

    Attributes:
        model: the whole model.
        rank, ranks: along the tensor axis.
        stage, stages: along the pipeline axis.
        expert_rank, expert_ranks: among the ranks that share the experts; 1: each expert is cut along the tensor axis.

    Raises:
        ValueError: the model cannot be cut so.
    """

    model: ModelConfig
    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1
    expert_rank: int = 0
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        self.model.local(self.ranks, self.expert_ranks)
        if self.stages > self.model.n_layers:
            raise ValueError(
                f"pipeline_parallel_size is {self.stages}, and the model has {self.model.n_layers} layers: every stage "
                "needs at least one"
            )

    @property
    def layers(self) -> slice:
        """Layers of this stage. If they do not divide evenly, the first stages have one more; the last stage computes
        the head too."""
        return share(self.model.n_layers, self.stage, self.stages)

    @property
    def first(self) -> bool:
        """True if this stage begins with token ids."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True if this stage ends with logits."""
        return self.stage == self.stages - 1

    @property
    def local(self) -> ModelConfig:
        """Sizes of the part that this rank computes: heads, feed-forward units and layers; the vocabulary is whole."""
        whole = self.model.local(self.ranks, self.expert_ranks)
        if self.stages == 1:
            return whole
        layers = self.layers
        moe = whole.moe
        if moe is not None:
            moe = replace(moe, dense_layers=self._own(moe.dense_layers))
        full, still = self._own(whole.full_attention_layers), self._own(whole.no_rope_layers)
        return replace(
            whole, n_layers=layers.stop - layers.start, full_attention_layers=full, no_rope_layers=still, moe=moe
        )

    def _own(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers of ``layers`` that this stage has, numbered from its first layer."""
        return tuple(i - self.layers.start for i in layers if self.layers.start <= i < self.layers.stop)

    @property
    def experts(self) -> slice:
        """Experts that this rank has a part of: all, or with expert parallelism its own."""
        assert self.model.moe is not None
        each = self.model.moe.experts // self.expert_ranks
        return slice(self.expert_rank * each, (self.expert_rank + 1) * each)

    @property
    def vocabulary(self) -> slice:
        """Tokens whose rows of the embedding and of the head this rank has."""
        return vocabulary_part(self.model.vocab_size, self.rank, self.ranks)

    def part(self, name: str, shape: tuple[int, ...]) -> WeightPart | None:
        """Return the rows and columns of the weight ``name`` (of ``shape`` in the files) that this rank has; None if it
        has none."""
        module = name.rpartition(".")[0]
        if module.startswith("layers."):
            _, layer, inner = module.split(".", 2)
            if not self.layers.start <= int(layer) < self.layers.stop:
                return None
            if inner in CUT_OUTPUTS:
                return WeightPart(self._even(shape[0], inner in ("attention.k", "attention.v")), ALL)
            if inner in CUT_INPUTS and len(shape) == 2:
                return WeightPart(ALL, self._even(shape[1]))
            if inner.startswith("mlp.experts_"):
                return self._expert_part(inner, shape)
            return self._head_part(name.split(".", 2)[2], shape)
        if module in ("embed", "position_embed"):
            tied = module == "embed" and self.last and self.model.tied_embeddings
            if not (self.first or tied):
                return None
        elif module == "head" and not self.last:
            return None
        return WeightPart(self.vocabulary if module in ("embed", "head") else ALL, ALL)

    def _expert_part(self, inner: str, shape: tuple[int, ...]) -> WeightPart | None:
        """Return the part of the matrices or the biases of all experts of a layer."""
        assert self.model.moe is not None
        experts = self.model.moe.experts
        if self.expert_ranks > 1:
            each = shape[0] // self.expert_ranks
            return WeightPart(slice(self.expert_rank * each, (self.expert_rank + 1) * each), ALL)
        if inner != "mlp.experts_down":
            return WeightPart(self._even(shape[0] // experts), ALL, experts)
        if len(shape) == 2:
            return WeightPart(ALL, self._even(shape[1]))
        return None if self.rank else WeightPart(ALL, ALL)  # one rank adds the bias

    def _head_part(self, name: str, shape: tuple[int, ...]) -> WeightPart:
        """Return the part of a layer's weights that are not matrices."""
        module = name.removesuffix(".weight")
        if module in CUT_HEADS and (module == "attention.sinks" or self.model.qk_norm_whole):
            return WeightPart(self._even(shape[0], CUT_HEADS[module]), ALL)
        return WeightPart(ALL, ALL)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of this rank's part of every weight, by the name in the whole model."""
        found = {}
        for name, shape in weight_shapes(self.model).items():
            part = self.part(name, shape)
            if part is not None:
                found[name] = part.shape(shape)
        return found

    def own_name(self, name: str) -> str:
        """Return the name, in this rank's model, of a weight that it has a part of."""
        if not name.startswith("layers."):
            return name
        _, layer, inner = name.split(".", 2)
        return f"layers.{int(layer) - self.layers.start}.{inner}"

    def whole_name(self, own: str) -> str:
        """Return the name, in the whole model, of a weight of this rank's model."""
        if not own.startswith("layers."):
            return own
        _, layer, inner = own.split(".", 2)
        return f"layers.{int(layer) + self.layers.start}.{inner}"

    def _even(self, size: int, of_key_heads: bool = False) -> slice:
        parts = min(self.ranks, self.model.n_kv_heads) if of_key_heads else self.ranks
        at = self.rank * parts // self.ranks
        return slice(at * size // parts, (at + 1) * size // parts)

    def __str__(self) -> str:
        model, parts = self.model, []
        if self.ranks > 1:
            heads = self._even(model.n_heads)
            keys = self._even(model.n_kv_heads, True)
            parts += [
                f"heads {_span(heads)} of {model.n_heads}",
                f"key heads {_span(keys)} of {model.n_kv_heads}",
                f"tokens {_span(self.vocabulary)} of {model.vocab_size}",
            ]
        if self.expert_ranks > 1 and model.moe is not None:
            parts.append(f"experts {_span(self.experts)} of {model.moe.experts}")
        if self.stages > 1:
            parts += [f"layers {_span(self.layers)} of {model.n_layers}"]
            parts += ["embedding"] if self.first else []
            parts += ["head"] if self.last else []
        return ", ".join(parts) or "the whole model"


def first_shard(model: ModelConfig, layout: RankLayout) -> Shard:
    """Return the shard of the first rank of a layout.

    Raises:
        ValueError: the model cannot be cut so.
    """
    sharing = layout.tensor * layout.data if layout.expert else 1
    return Shard(model, 0, layout.tensor, 0, layout.pipeline, 0, sharing)


def _span(part: slice) -> str:
    return f"{part.start}" if part.stop == part.start + 1 else f"{part.start}-{part.stop - 1}"
