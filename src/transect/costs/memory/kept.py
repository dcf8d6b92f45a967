"""Tensors that a layer keeps from its forward pass for its gradients, in bytes for each token.

Autograd holds a tensor once however many operators ask for it, so the set of tensors counts, by the table below
(e bytes an element, w = max(4, e): torch's own operators compute in float32 and keep that copy). In float32 the CPU has
C++ kernels for RMSNorm, rotary, attention and swiglu that keep what the Triton kernels keep, and the norm one over its
size for each row.

=====================  ==================================  =========================================================
operator               Triton kernels (``gpu``)             plain torch (``cpu``)
=====================  ==================================  =========================================================
norm                   its input: e D                       its input in float32: w D; one over its size: w; if its
                                                            weight is trained, the normalized rows: w D
linear                 its input: e I, if its weight is     the same
                       trained or an adapter reads it
adapter                the input's product with A: e rank   the same
rotary                 cos, sin: 4 d, once for all layers   the same
attention              q, k, v, out: e; log-sums: 4 H       the same, and the documents' results before they are
                                                            joined: e H d
swiglu                 gate and up: 2 e F                   gate, exp, 1 + exp, their ratio, up: 5 w F
gelu                   its input: e F                       its input, tanh or erf, the share: 3 w F
residual addition      nothing                              nothing
int4 product           nothing: the weight is made again    the same
=====================  ==================================  =========================================================

A checkpointed part keeps its input and nothing else. Tests count what autograd holds and compare.

Shapes: T tokens, D model dim, F ffn dim, H query heads, d head size, I inputs of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...spec.model import ModelConfig

Backend = Literal["gpu", "cpu"]
Kept = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Reads:
    """Matrices of a layer whose gradient needs their input: all if weights are trained, else those with an adapter.
    ``rank``: of the adapters, 0 without them. ``norms``: True if the weights of norms are trained."""

    qkv: int
    """Number of q, k, v that keep their shared input."""
    o: bool
    gate_up: int
    down: bool
    rank: int
    norms: bool

    @classmethod
    def everything(cls, config: ModelConfig) -> Reads:
        """Return the reads of a run that trains every weight."""
        return cls(3, True, 1 + config.gated_mlp, True, 0, True)

    @classmethod
    def adapters(cls, config: ModelConfig, targets: tuple[str, ...], rank: int) -> Reads:
        """Return the reads of a run that trains only adapters of ``rank`` on ``targets``."""
        there = set(targets) - (set() if config.gated_mlp else {"gate"})
        return cls(
            len(there & {"q", "k", "v"}), "o" in there, len(there & {"gate", "up"}), "down" in there, rank, False
        )


@dataclass(frozen=True, slots=True)
class LayerKept:
    """Bytes for each token of one layer: its two blocks, without checkpointing."""

    attention: float
    mlp: float
    input: float
    """Bytes of the residual stream at one point, which a checkpointed part keeps."""

    def under(self, plan: Kept) -> float:
        """Return the bytes that stay until the layer's backward pass."""
        if plan == "full":
            return self.input
        return self.attention + (self.input if plan == "selective" else self.mlp)

    def again(self, plan: Kept) -> float:
        """Return the bytes that are recomputed, and held during the layer's own backward pass."""
        return {"none": 0.0, "selective": self.mlp, "full": self.attention + self.mlp}[plan]


def layer_kept(
    config: ModelConfig,
    reads: Reads,
    element: int,
    backend: Backend,
    *,
    first: bool = False,
    stream: int | None = None,
) -> LayerKept:
    """Count the bytes that one layer keeps.

    Args:
        element: bytes of a number in the compute dtype.
        first: with adapters nothing below the first layer is trained, so the norm at its start keeps nothing.
        stream: columns of the residual stream that a rank has for each token, if ranks share it. Inputs of matrices
            are whole all the same.
    """
    wide = max(4, element)
    dim, heads, q, kv, ffn = config.dim, config.n_heads, config.q_dim, config.kv_dim, config.widest_mlp
    ranks = 1 if config.moe is None else config.moe.ranks  # there are rows for the tokens of all that share experts
    ffn *= ranks
    stream = dim if stream is None else stream
    plain = backend == "cpu" and element != 4

    def norm(width: int, rows: int = 1) -> float:
        if backend == "gpu":
            return element * width
        if native_norm(config, element):
            return element * width + 4 * rows
        return wide * width * (1 + reads.norms) + wide * rows

    attention = 0.0 if first and reads.rank else norm(stream)
    attention += element * dim * bool(reads.qkv) + element * reads.rank * (reads.qkv + reads.o)
    if config.qk_norm:
        attention += norm(q, heads) + norm(kv, config.n_kv_heads)
    attention += element * (2 * q + 2 * kv) + 4 * heads
    if plain and reads.o:
        attention += element * q
    mlp = norm(stream) + element * dim * bool(reads.gate_up) + element * reads.rank * (reads.gate_up + reads.down)
    if config.gated_mlp:
        mlp += (5 * wide if plain else 2 * element) * ffn
    else:
        mlp += (3 * wide if backend == "cpu" else element) * ffn
    mlp += element * ffn * reads.down
    if config.moe is not None:  # the outputs of each expert for a token, and the router's scores
        mlp += ranks * (element * dim * config.moe.per_token + 8 * config.moe.experts)
    return LayerKept(attention, mlp, element * stream)


def outside_layers(config: ModelConfig, reads: Reads, element: int, backend: Backend) -> float:
    """Count the bytes that are kept once for each token: angles, the final norm, the tokens of a trained embedding."""
    wide = max(4, element)
    angles = 4 * config.head_dim if config.position == "rope" else 0
    tables = 8 * (1 + (config.position == "learned")) if reads.norms else 0
    if backend == "gpu":
        return angles + element * config.dim + tables
    normalized = reads.norms and not native_norm(config, element)
    return angles + wide * config.dim * (1 + normalized) + wide + tables


def native_norm(config: ModelConfig, element: int) -> bool:
    """Return True if a norm on the CPU runs in C++: RMSNorm in float32."""
    return element == 4 and config.norm != "layernorm"
