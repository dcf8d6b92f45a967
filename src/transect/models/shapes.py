"""The canonical names and shapes of a model's weights, from its configuration alone (no torch).

These are the names of ``Decoder.state_dict()``. Loading checks files against them, and the cost arithmetic counts them.
"""

from __future__ import annotations

import math

from .config import ModelConfig


def linear_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, int], bool]]:
    """The matrices of one layer: name inside the layer to ((outputs, inputs), whether it has a bias)."""
    dim, ffn = config.dim, config.ffn_dim
    shapes = {
        "attention.q": ((config.q_dim, dim), config.qkv_bias),
        "attention.k": ((config.kv_dim, dim), config.qkv_bias),
        "attention.v": ((config.kv_dim, dim), config.qkv_bias),
        "attention.o": ((dim, config.q_dim), config.o_bias),
        "mlp.up": ((ffn, dim), config.mlp_bias),
        "mlp.down": ((dim, ffn), config.mlp_bias),
    }
    if config.gated_mlp:
        shapes["mlp.gate"] = ((ffn, dim), config.mlp_bias)
    return shapes


PROJECTIONS = {
    "qkv": ("attention.q", "attention.k", "attention.v"),
    "o": ("attention.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
"""The matrices of a layer that share an input."""


def projection_shapes(config: ModelConfig) -> dict[str, dict[str, tuple[int, int]]]:
    """The projections of one layer: the matrices of each, by name inside the layer, and their (outputs, inputs)."""
    shapes = linear_shapes(config)
    return {
        projection: {name: shapes[name][0] for name in names if name in shapes}
        for projection, names in PROJECTIONS.items()
    }


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the model by canonical name; with tied embeddings there is no ``head.weight`` of its own."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, config.dim)}
    if config.position == "learned":
        shapes["position_embed.weight"] = (config.max_position, config.dim)

    def norm(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = (size,)
        if config.norm == "layernorm":
            shapes[f"{name}.bias"] = (size,)

    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        for name, (shape, bias) in linear_shapes(config).items():
            shapes[f"{prefix}{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}{name}.bias"] = (shape[0],)
        if config.qk_norm:
            shapes[f"{prefix}attention.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}attention.k_norm.weight"] = (config.head_dim,)
        norm(f"{prefix}attention_norm", config.dim)
        norm(f"{prefix}mlp_norm", config.dim)
    norm("norm", config.dim)
    if not config.tied_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.dim)
    return shapes


def parameter_count(config: ModelConfig) -> int:
    """How many numbers the weights are."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())
