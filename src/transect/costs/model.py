"""The work of a step of a model, and its memory: FLOPs and bytes from the configuration alone.

A step is a ragged batch of rows: the tokens that each computes, and the length of its sequence with them. Weights count
as they are stored (``storage.py``), and a ``Weight`` counts its own product by the same ``product_cost``. There are two
accounts of a step:

* ``step_cost`` follows the operators: each input read once, each output written once. It adds up to a floor for running
  the model operator by operator, and equals what the operators declare themselves.
* ``least_products`` and ``least_attention`` are the work that no implementation can avoid: matrices, with the inputs
  and outputs of each projection once, keys and values, the head. Norms, rotations, additions, biases and sampling are
  left out. ``floors.py`` makes floors of it.

An embedding table is gathered: its rows count, the table does not; the output head, though it may share that table, is
read whole. Decode is bound by reading weights and cache, prefill by arithmetic: ``Cost.intensity`` of a step says
which.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..spec.model import ModelConfig
from ..spec.moe import MoEConfig
from ..spec.weights import EXPERTS, linear_shapes, projection_shapes, router_shapes, weight_shapes
from .storage import Storage
from .work import Cost, expert_cost, product_cost, touched, visible_keys, visible_pairs


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the batch: ``new`` tokens computed now, ``length`` tokens of the sequence with them."""

    new: int
    length: int

    def __post_init__(self) -> None:
        if not 0 < self.new <= self.length:
            raise ValueError(f"a row computes between 1 and all {self.length} of its tokens, not {self.new}")


def step_cost(
    config: ModelConfig, rows: Sequence[Row], *, storage: Storage | None = None, logit_rows: int | None = None
) -> dict[str, Cost]:
    """Return the cost of one step by operator: ``embed``, ``linear``, ``rms_norm``, ..., ``paged_attention``, ``head``.

    ``logit_rows`` is how many tokens get logits: by default one for each row. Logits are written in float32. Not
    counted: softmax, residual additions, block tables, sampling.
    """
    storage = storage or Storage()
    tokens = sum(row.new for row in rows)
    logit_rows = len(rows) if logit_rows is None else logit_rows
    counter = _Counter(config, storage, tokens)
    counter.embed()
    for layer in range(config.n_layers):
        counter.layer(rows, layer)
    counter.model_norm()
    counter.head(logit_rows)
    return counter.costs


def least_products(config: ModelConfig, tokens: int, logit_rows: int, storage: Storage) -> dict[str, Cost]:
    """Return the unavoidable products of a step: ``linear`` (the matrices of all layers) and ``head``, for
    ``logit_rows`` tokens, with logits in the dtype of activations."""
    linear = Cost(0, 0, 0)
    for layer, count in _kinds(config):
        linear += _layer_products(config, layer, tokens, storage) * count
    head = Cost(0, 0, 0)
    if logit_rows:
        head = product_cost(
            logit_rows, [config.vocab_size], config.dim, bits=storage.head, activation=storage.activation
        )
    return {"linear": linear, "head": head}


def least_attention(config: ModelConfig, rows: Sequence[Row], storage: Storage) -> Cost:
    """Return the unavoidable work of attention: products of visible pairs; visible keys and values are read once."""
    pairs = keys = 0.0
    for reach, count in Counter(map(config.layer_reach, range(config.n_layers))).items():
        pairs += count * sum(visible_pairs(row.new, row.length, *reach) for row in rows)
        keys += count * sum(visible_keys(row.new, row.length, *reach) for row in rows)
    return Cost(4 * pairs * config.q_dim, 2 * keys * config.kv_dim * storage.kv / 8, 0)


@lru_cache(maxsize=256)
def _kinds(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Group layers with equal matrices: the first layer of each kind, and their number."""
    found: dict[tuple[object, ...], list[int]] = {}
    for layer in range(config.n_layers):
        found.setdefault(tuple(linear_shapes(config, layer).items()), []).append(layer)
    return tuple((layers[0], len(layers)) for layers in found.values())


def _layer_products(config: ModelConfig, layer: int, tokens: int, storage: Storage) -> Cost:
    """Return the work of the matrices of one layer: of its experts, those that ``tokens`` tokens touch."""
    moe = config.layer_moe(layer)
    found = Cost(0, 0, 0)
    for parts in projection_shapes(config, layer).values():
        sizes = [shape[0] for shape in parts.values()]
        inputs = next(iter(parts.values()))[1]
        numbers = [shape[0] * shape[1] for shape in parts.values()]
        stored = sum(size * storage.of(name) for size, name in zip(numbers, parts, strict=True)) / sum(numbers)
        how = {"bits": stored, "activation": storage.activation}
        if moe is not None and next(iter(parts)) in EXPERTS:
            each = [n // moe.held for n in sizes]
            ordered = "mlp.experts_down" not in parts
            mine, distinct = tokens / moe.ranks, touched(tokens, moe.per_token, moe.experts) / moe.ranks
            found += expert_cost(
                mine, moe.per_token, moe.experts, each, inputs, ordered=ordered, distinct=distinct, **how
            )
        else:
            found += product_cost(tokens, sizes, inputs, **how)
    if moe is not None:
        found += product_cost(tokens, [moe.experts], config.dim, bits=storage.norm, activation=32)
    return found


def weight_bytes(
    config: ModelConfig, storage: Storage | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> float:
    """Count the memory of the weights, or of those parts of them that ``shapes`` names
    (``parallel.shards.Shard.shapes``)."""
    storage = storage or Storage()
    bits = 0.0
    shapes = weight_shapes(config) if shapes is None else shapes
    for name, shape in shapes.items():
        if name in ("embed.weight", "position_embed.weight"):
            each = storage.embed
        elif name == "head.weight":
            each = storage.head
        else:
            inner = ".".join(name.split(".")[2:4])
            each = storage.of(inner) if len(shape) == 2 and not inner.endswith("router") else storage.norm
        bits += math.prod(shape) * each
    if config.tied_embeddings and storage.head_copied:
        bits += math.prod(shapes.get("embed.weight", (0,))) * storage.head
    return bits / 8


def kv_bytes_per_token(config: ModelConfig, storage: Storage | None = None) -> float:
    """Count the memory of one token in the KV cache: keys and values of every layer."""
    return 2 * config.n_layers * config.kv_dim * (storage or Storage()).kv / 8


class _Counter:
    """Adds up costs by operator; every method mirrors the module or operator of its name."""

    def __init__(self, config: ModelConfig, storage: Storage, tokens: int) -> None:
        self.config = config
        self.storage = storage
        self.tokens = tokens
        self.costs: dict[str, Cost] = {}

    def add(self, name: str, flops: float, read_bits: float, written_bits: float) -> None:
        self.costs[name] = self.costs.get(name, Cost(0, 0, 0)) + Cost(flops, read_bits / 8, written_bits / 8)

    def embed(self) -> None:
        elements = self.tokens * self.config.dim
        tables = 2 if self.config.position == "learned" else 1
        self.add("embed", 0, tables * elements * self.storage.embed, tables * elements * self.storage.activation)

    def norm(self, name: str, rows: int, size: int) -> None:
        flops, weights = {"rms_norm": (4, 1), "layer_norm": (7, 2)}[name]
        activation = rows * size * self.storage.activation
        self.add(name, flops * rows * size, activation + weights * size * self.storage.norm, activation)

    def model_norm(self) -> None:
        self.norm("layer_norm" if self.config.norm == "layernorm" else "rms_norm", self.tokens, self.config.dim)

    def linear(self, name: str, shape: tuple[int, int], bias: bool, moe: MoEConfig | None = None) -> None:
        storage = self.storage
        if moe is not None and name in EXPERTS:
            pairs = self.tokens * moe.per_token
            ordered = not name.endswith("down")
            if ordered and moe.gated_at_once:
                if name == "mlp.experts_up":
                    self.gate_up(shape, moe)
                return
            self.costs["grouped_linear"] = self.costs.get("grouped_linear", Cost(0, 0, 0)) + expert_cost(
                self.tokens, moe.per_token, moe.experts, [shape[0] // moe.experts], shape[1], ordered=ordered,
                bits=storage.of(name), activation=storage.activation, bias=bias * storage.norm,
                distinct=touched(pairs, 1, moe.experts),
            )  # fmt: skip
            self.add("grouped_linear", 0, 32 * (moe.experts + 1 + pairs * ordered), 0)
            return
        cost = product_cost(
            self.tokens, shape[:1], shape[1], bits=storage.of(name), activation=storage.activation,
            bias=bias * storage.norm,
        )  # fmt: skip
        self.costs["linear"] = self.costs.get("linear", Cost(0, 0, 0)) + cost

    def gate_up(self, shape: tuple[int, int], moe: MoEConfig) -> None:
        """Count gate and up of experts, ``shape`` each, in one operator."""
        pairs, each = self.tokens * moe.per_token, shape[0] // moe.experts
        storage = self.storage
        share = touched(pairs, 1, moe.experts) / moe.experts
        bits = shape[0] * shape[1] * (storage.of("mlp.experts_gate") + storage.of("mlp.experts_up"))
        read = self.tokens * shape[1] * storage.activation + share * bits + 32 * (moe.experts + 1 + pairs)
        flops = pairs * each * (4 * shape[1] + 5)
        self.add("grouped_gate_up", flops, read, pairs * each * storage.activation)

    def elementwise(self, name: str, flops: int, inputs: int, elements: int) -> None:
        activation = elements * self.storage.activation
        self.add(name, flops * elements, inputs * activation, activation)

    def layer(self, rows: Sequence[Row], layer: int) -> None:
        config, tokens = self.config, self.tokens
        moe = config.layer_moe(layer)
        self.model_norm()
        for name, (shape, bias) in linear_shapes(config, layer).items():
            self.linear(name, shape, bias, moe)
        if moe is not None:
            self.experts(moe, layer)
        if config.qk_norm_whole:
            self.norm("rms_norm", tokens, config.q_dim)
            self.norm("rms_norm", tokens, config.kv_dim)
        elif config.qk_norm:
            self.norm("rms_norm", tokens * config.n_heads, config.head_dim)
            self.norm("rms_norm", tokens * config.n_kv_heads, config.head_dim)
        if config.position == "rope":
            self.elementwise("rotary", 3, 1, tokens * (config.q_dim + config.kv_dim))
            self.add("rotary", 0, tokens * config.head_dim * 32, 0)  # cos and sin, float32
        self.kv_cache_write()
        self.paged_attention(rows, config.layer_reach(layer))
        self.model_norm()
        if config.gated_mlp:
            width = config.mlp_width(layer) if moe is None or not moe.gated_at_once else moe.shared_dim
            if width:
                self.elementwise("swiglu", 5, 2, tokens * width)
        else:
            self.elementwise("gelu", 10, 1, tokens * config.ffn_dim)

    def experts(self, moe: MoEConfig, layer: int) -> None:
        """Count router, order and weighted sum; the products of the experts are counted as ``grouped_linear``."""
        storage, tokens, width = self.storage, self.tokens, self.config.dim
        for name, shape in router_shapes(self.config, layer).items():
            if len(shape) == 2:
                if "shared" in name:
                    self.linear(name, (shape[0], shape[1]), False)
                    continue
                flops = tokens * moe.experts * (2 * width + moe.router_bias)
                read = tokens * width * storage.activation + moe.experts * (width + moe.router_bias) * storage.norm
                self.add("expert_router", flops, read, 32 * tokens * moe.experts)
        pairs = tokens * moe.per_token
        scores = 32 * moe.experts * (tokens + moe.score_bias)
        written = 128 * pairs + 32 * (moe.held + 1)
        self.add("expert_routing", (5 + moe.per_token) * tokens * moe.experts, scores, written)
        rows = pairs * width * storage.activation
        self.add("expert_combine", 2 * pairs * width, rows + 64 * pairs, tokens * width * storage.activation)

    def kv_cache_write(self) -> None:
        elements = 2 * self.tokens * self.config.kv_dim
        self.add("kv_cache_write", 0, elements * self.storage.activation, elements * self.storage.kv)

    def paged_attention(self, rows: Sequence[Row], reach: tuple[int | None, int | None]) -> None:
        pairs = sum(visible_pairs(row.new, row.length, *reach) for row in rows)
        cached = sum(visible_keys(row.new, row.length, *reach) for row in rows)
        q = self.tokens * self.config.q_dim * self.storage.activation
        self.add(
            "paged_attention", 4 * pairs * self.config.q_dim, q + 2 * cached * self.config.kv_dim * self.storage.kv, q
        )

    def head(self, rows: int) -> None:
        size = self.config.vocab_size * self.config.dim
        read = rows * self.config.dim * self.storage.activation + (size * self.storage.head if rows else 0)
        self.add("head", 2 * rows * size, read, rows * self.config.vocab_size * 32)
