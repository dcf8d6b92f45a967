"""What a device needs at the least to run a model: the floor that measured times stand beside.

The work that cannot be avoided, operator by operator: a matrix of weights is read once a step, with what goes into it
and comes out of it, or multiplied at the matrix rate, whichever takes longer; keys and values of every sequence are
read once, or attended at the matrix rate. Norms, rotations, additions and sampling are left out. MFU and MBU are these
FLOPs and bytes over the measured time, as shares of what the device can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..hardware.ceilings import Ceilings
from ..models.config import ModelConfig
from ..models.cost import Row, Storage
from ..models.resolve import ModelSource
from ..models.shapes import linear_shapes
from ..ops.counting import visible_keys, visible_pairs


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second read, and FLOP/s of matrix products in the dtype that the model computes in."""

    bytes_per_second: float
    flops_per_second: float
    device: str = ""

    @classmethod
    def of(cls, ceilings: Ceilings, dtype: str) -> Rates:
        """The two that bound a model.

        Raises:
            ValueError: the ceilings have no rate for ``dtype``.
        """
        return cls(ceilings.read_bytes_per_second, ceilings.rate(dtype), ceilings.device)


@dataclass(frozen=True, slots=True)
class Floor:
    """FLOPs, bytes, and the seconds that they take at the least."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Floor) -> Floor:
        return Floor(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)

    def compared(self, measured_s: float, rates: Rates) -> dict[str, float]:
        """``floor_s``, ``of_floor`` (1: at the floor), ``mbu`` and ``mfu`` of a measured time in seconds."""
        return {
            "floor_s": self.seconds,
            "of_floor": self.seconds / measured_s,
            "mbu": self.bytes / measured_s / rates.bytes_per_second,
            "mfu": self.flops / measured_s / rates.flops_per_second,
        }


def step_floor(
    config: ModelConfig,
    rows: Sequence[Row],
    rates: Rates,
    storage: Storage | None = None,
    logit_rows: int | None = None,
) -> Floor:
    """One step of a ragged batch; ``logit_rows`` tokens go through the output head, by default one for each row."""
    storage = storage or Storage()
    logit_rows = len(rows) if logit_rows is None else logit_rows
    tokens = sum(row.new for row in rows)
    linear = config.n_layers * sum(math.prod(shape) for shape, _ in linear_shapes(config).values())
    # q, k and v share an input, and so do gate and up
    inputs = config.dim + config.q_dim + config.dim + config.ffn_dim
    outputs = config.q_dim + 2 * config.kv_dim + config.dim + (1 + config.gated_mlp) * config.ffn_dim + config.dim
    around_linear = tokens * config.n_layers * (inputs + outputs) * storage.activation
    head = config.vocab_size * config.dim if logit_rows else 0
    around_head = logit_rows * (config.dim + config.vocab_size) * storage.activation
    pairs, keys = 0.0, 0.0
    for window, layers in _windows(config).items():
        pairs += layers * sum(visible_pairs(row.new, row.length, window) for row in rows)
        keys += layers * sum(visible_keys(row.new, row.length, window) for row in rows)
    parts = (
        (2 * tokens * linear, (linear * storage.linear + around_linear) / 8),
        (2 * logit_rows * head, (head * storage.head + around_head) / 8),
        (4 * pairs * config.q_dim, 2 * keys * config.kv_dim * storage.kv / 8),
    )
    return sum(
        (
            Floor(flops, size, max(flops / rates.flops_per_second, size / rates.bytes_per_second))
            for flops, size in parts
        ),
        Floor(),
    )


def batch_floor(
    config: ModelConfig, lengths: Iterable[tuple[int, int]], rates: Rates, storage: Storage | None = None
) -> tuple[Floor, Floor]:
    """(prefill, decode) of sequences of (prompt tokens, output tokens) that all run together.

    All prompts are computed in one go, which draws every first token; then each step decodes the sequences that still
    have tokens to draw.
    """
    lengths = list(lengths)
    prefill = step_floor(config, [Row(prompt, prompt) for prompt, _ in lengths], rates, storage)
    decode = Floor()
    for drawn in range(1, max(new for _, new in lengths)):
        rows = [Row(1, prompt + drawn) for prompt, new in lengths if new > drawn]
        decode += step_floor(config, rows, rates, storage)
    return prefill, decode


def _windows(config: ModelConfig) -> dict[int | None, int]:
    """How many layers see how far back."""
    counts: dict[int | None, int] = {}
    for layer in range(config.n_layers):
        window = config.layer_window(layer)
        counts[window] = counts.get(window, 0) + 1
    return counts


def storage_of(source: ModelSource, dtype: str, *, keeps_quantized: bool) -> Storage:
    """Bits of weights and KV cache as an engine of this ``dtype`` holds them.

    ``keeps_quantized``: the C++ kernels run, which keep a GGUF file's matrices in their own formats. Other weights are
    bfloat16, or float32 where ``dtype`` says so.
    """
    dense = 32.0 if dtype == "float32" else 16.0
    if source.kind != "gguf" or not keeps_quantized:
        return Storage(linear=dense, embed=dense, head=dense, kv=dense, activation=dense)
    sizes = {"head": [0, 0], "linear": [0, 0]}
    head = "token_embd.weight" if source.config.tied_embeddings else "output.weight"
    for name, tensor in source.gguf.tensors.items():
        kind = "head" if name == head else "linear" if name.startswith("blk.") and len(tensor.shape) == 2 else None
        if kind is not None:
            sizes[kind][0] += tensor.blocks.nbytes
            sizes[kind][1] += math.prod(tensor.shape)
    bits = {kind: 8 * size / count for kind, (size, count) in sizes.items()}
    return Storage(linear=bits["linear"], embed=bits["head"], head=bits["head"], kv=dense, activation=32)
