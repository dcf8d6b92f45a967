"""Tensors that a layer keeps, and its temporaries, if training runs it as one node (``train/model/merged_layers.py``).

Numbers of the compute dtype for each token; names as there. R is the ranks of the adapters of the matrices that share
an input, rounded up to 64: the columns beside the product's input, its output and their gradients.

    always                  s: D
    none, selective         q, k, v: H d + 2 K d + R     o: H d     t: D     and 4 bytes a head for the softmax
    none                    n: D + R     m: D + R     gate and up: 2 F + R
    adapters                R of each product (of the last alone under ``full``)

Shapes: D model dim, F ffn dim, H query heads, K key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...spec.model import ModelConfig
from ...spec.weights import PROJECTIONS, projection_shapes
from .kept import Kept
from .sizes import ADAPTER_COLUMNS

GROUPS = {name: tuple(part.split(".")[1] for part in parts) for name, parts in PROJECTIONS.items()}
"""Matrices that share an input, by their names in ``targets``."""


@dataclass(frozen=True, slots=True)
class MergedKept:
    """Bytes for each token. ``mlp`` and ``attention`` are added while the gradients of that block are computed;
    ``dropped`` (m, gate and up) is freed between the blocks if it was recomputed."""

    kept: Mapping[Kept, float]
    mlp: float
    attention: float
    dropped: float

    def under(self, plan: Kept) -> float:
        """Return the bytes that stay until the layer's backward pass."""
        return self.kept[plan]

    def again(self, plan: Kept) -> float:
        """Return the bytes that are recomputed, and held during the layer's own backward pass."""
        return self.kept["none"] - self.kept[plan]


def spare(targets: tuple[str, ...], rank: int) -> dict[str, int]:
    """Return R of each product; 0 for ``rank`` 0, without adapters."""
    ranks = {name: rank * len(set(members) & set(targets)) for name, members in GROUPS.items()}
    return {name: -(-each // ADAPTER_COLUMNS) * ADAPTER_COLUMNS for name, each in ranks.items()}


def merged_kept(
    config: ModelConfig, targets: tuple[str, ...], rank: int, element: int, stream: int | None = None
) -> MergedKept:
    """Count the bytes of one layer. ``element``: bytes of a number in the compute dtype. ``stream``: columns of the
    residual stream, fewer if a rank has fewer of its rows."""
    dim, q, kv, ffn = config.dim, config.q_dim, config.kv_dim, config.ffn_dim
    stream = dim if stream is None else stream
    room = spare(targets, rank)
    full = stream + room["down"]
    selective = full + q + 2 * kv + 2 * room["qkv"] + q + stream + room["o"]
    none = selective + 2 * dim + room["qkv"] + 3 * room["gate_up"] + 2 * ffn
    sums = 4 * config.n_heads
    # The gradient from above; that of the inner activations or that of the norm; then the attention's, with dq summed
    # in float32 and the products g . o.
    mlp = element * (2 * dim + room["down"] + ffn)
    attention = element * (2 * dim + room["down"] + room["o"] + 2 * (q + kv)) + 4 * q + sums
    if config.qk_norm:  # q and k as attention sees them, beside those that are kept
        attention += element * (q + kv)
    kept = {"full": element * full, "selective": element * selective + sums, "none": element * none + sums}
    dropped = element * (dim + 2 * ffn + 2 * room["gate_up"])
    return MergedKept(kept, mlp, attention, dropped)  # type: ignore[arg-type]


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each merged product."""
    return {
        name: (sum(shape[0] for shape in parts.values()), next(iter(parts.values()))[1])
        for name, parts in projection_shapes(config).items()
    }


def matrix_numbers(config: ModelConfig, targets: tuple[str, ...], rank: int) -> tuple[int, int]:
    """Return (numbers that one layer's matrices hold beside the weights, numbers of the largest), for adapters."""
    room = spare(targets, rank)
    sizes = {name: (rows + room[name]) * (columns + room[name]) for name, (rows, columns) in matrices(config).items()}
    plain = sum(rows * columns for rows, columns in matrices(config).values())
    return sum(sizes.values()) - plain, max(sizes.values())
