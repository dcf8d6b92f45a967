"""The canonical names and shapes of a model's weights, from its configuration alone (no torch).

These are the names of ``Decoder.state_dict()``. Loading checks files against them, and the cost arithmetic counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from .model import ModelConfig


def linear_shapes(config: ModelConfig, layer: int = 0) -> dict[str, tuple[tuple[int, int], bool]]:
    """Map the matrices of one layer from the name inside the layer to ((outputs, inputs), True if it has a bias).

    The matrices of all experts are concatenated along rows: ``mlp.experts_up`` has ``held * expert_dim`` rows.
    """
    dim, ffn = config.dim, config.ffn_dim
    shapes = {
        "attention.q": ((config.q_dim, dim), config.qkv_bias),
        "attention.k": ((config.kv_dim, dim), config.qkv_bias),
        "attention.v": ((config.kv_dim, dim), config.qkv_bias),
        "attention.o": ((dim, config.q_dim), config.o_bias),
    }
    moe = config.layer_moe(layer)
    if moe is None:
        shapes |= {"mlp.up": ((ffn, dim), config.mlp_bias), "mlp.down": ((dim, ffn), config.mlp_bias)}
        if config.gated_mlp:
            shapes["mlp.gate"] = ((ffn, dim), config.mlp_bias)
        return shapes
    rows = moe.held * moe.expert_dim
    shapes |= {
        "mlp.experts_gate": ((rows, dim), moe.bias),
        "mlp.experts_up": ((rows, dim), moe.bias),
        "mlp.experts_down": ((moe.held * dim, moe.expert_dim), moe.bias),
    }
    if moe.shared_dim:
        shapes |= {
            "mlp.shared_gate": ((moe.shared_dim, dim), False),
            "mlp.shared_up": ((moe.shared_dim, dim), False),
            "mlp.shared_down": ((dim, moe.shared_dim), False),
        }
    return shapes


EXPERTS = ("mlp.experts_gate", "mlp.experts_up", "mlp.experts_down")
"""Matrices of which a step reads only the touched experts."""

PROJECTIONS = {
    "qkv": ("attention.q", "attention.k", "attention.v"),
    "o": ("attention.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
"""Matrices of a layer that share an input."""
EXPERT_PROJECTIONS = {
    "experts_gate_up": ("mlp.experts_gate", "mlp.experts_up"),
    "experts_down": ("mlp.experts_down",),
    "shared_gate_up": ("mlp.shared_gate", "mlp.shared_up"),
    "shared_down": ("mlp.shared_down",),
}
"""Matrices that share an input in a layer with experts, beside those of its attention."""


def projection_shapes(config: ModelConfig, layer: int = 0) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the projections of one layer: the matrices of each, by name inside the layer, and their (outputs,
    inputs)."""
    shapes = linear_shapes(config, layer)
    found = {
        projection: {name: shapes[name][0] for name in names if name in shapes}
        for projection, names in (PROJECTIONS | EXPERT_PROJECTIONS).items()
    }
    return {projection: parts for projection, parts in found.items() if parts}


def within_joined(config: ModelConfig, name: str, rows: int, joined: Iterable[str], layer: int = 0) -> tuple[int, int]:
    """Return (first row, all rows) of a matrix or its bias in the matrix that contains it: itself, or one of the
    projections ``joined``."""
    for parts in (projection_shapes(config, layer).get(projection, {}) for projection in joined):
        if name in parts:
            sizes = [outputs for outputs, _ in parts.values()]
            return sum(sizes[: list(parts).index(name)]), sum(sizes)
    return 0, rows


def router_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's router, by name inside the layer."""
    moe = config.layer_moe(layer)
    if moe is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"mlp.router.weight": (moe.experts, config.dim)}
    if moe.router_bias:
        shapes["mlp.router.bias"] = (moe.experts,)
    if moe.score_bias:
        shapes["mlp.router.score_bias"] = (moe.experts,)
    if moe.shared_gate:
        shapes["mlp.shared_router.weight"] = (1, config.dim)
    return shapes


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of the model by canonical name; with tied embeddings there is no
    ``head.weight``."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, config.dim)}
    if config.position == "learned":
        shapes["position_embed.weight"] = (config.max_position, config.dim)

    def norm(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = (size,)
        if config.norm == "layernorm":
            shapes[f"{name}.bias"] = (size,)

    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        for name, (shape, bias) in linear_shapes(config, layer).items():
            shapes[f"{prefix}{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}{name}.bias"] = (shape[0],)
        shapes |= {f"{prefix}{name}": shape for name, shape in router_shapes(config, layer).items()}
        if config.qk_norm:
            whole = config.qk_norm_whole
            shapes[f"{prefix}attention.q_norm.weight"] = (config.q_dim if whole else config.head_dim,)
            shapes[f"{prefix}attention.k_norm.weight"] = (config.kv_dim if whole else config.head_dim,)
        if config.attention_sinks:
            shapes[f"{prefix}attention.sinks"] = (config.n_heads,)
        for half in ("attention", "mlp"):
            if config.norm_order != "post":
                norm(f"{prefix}{half}_norm", config.dim)
            if config.norm_order != "pre":
                norm(f"{prefix}{half}_post_norm", config.dim)
    norm("norm", config.dim)
    if not config.tied_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.dim)
    return shapes


def largest_matrix(config: ModelConfig) -> int:
    """Count the numbers of the largest matrix of the layers; all experts of a layer are one."""
    layers = range(config.n_layers) if config.moe else (0,)
    return max(outputs * inputs for layer in layers for (outputs, inputs), _ in linear_shapes(config, layer).values())


def parameter_count(config: ModelConfig) -> int:
    """Count the numbers in all weights."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())
