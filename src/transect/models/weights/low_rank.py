r"""``LowRank``: the factors of an adapter beside a matrix, in the form of files.

    W' = W + s B A                       LoRA (Hu et al. 2021, arXiv:2106.09685)
    W' = m / ||W + s B A|| (W + s B A)   DoRA (Liu et al. 2024, arXiv:2402.09353), norms of rows

Shapes: O outputs, I inputs, r the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...hardware.host_memory import host_memory
from ...ops.cpu.library import Library, PackedWeight
from ...ops.cpu.stack import PRODUCTS, PackedLowRank, StackAdapter


@dataclass(frozen=True, slots=True)
class LowRank:
    """Factors ``a [r, I]``, ``b [O, r]`` beside a matrix, and DoRA's ``magnitude [O]``."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    def applied(self, weight: Tensor) -> Tensor:
        """Return the plain matrix ``[O, I]`` that computes the same as ``weight`` with these factors, at least
        float32."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        moved = weight.to(wide) + self.scale * (self.b.to(wide) @ self.a.to(wide))
        if self.magnitude is None:
            return moved
        return moved * (self.magnitude.to(wide) / torch.linalg.vector_norm(moved, dim=1))[:, None]


Factors = Mapping[str, LowRank]
"""Factors by canonical name of a matrix, without ``.weight``."""


def packed_adapter(library: Library, factors: Factors, layers: int, *, half: bool) -> StackAdapter:
    """Pack an adapter for the C++ stack.

    Args:
        half: keep the factors in bfloat16.

    All factors lie in one memory, in huge pages: a step reads each once, in short pieces, and with pages of 4 KiB the
    look-up of their addresses takes as long as reading them.
    """
    dtype = torch.bfloat16 if half else torch.float32
    pieces: list[Tensor] = []

    def packed(matrix: Tensor) -> PackedWeight:
        kind, data = library.pack_dense(matrix.to(dtype))
        outputs, inputs = matrix.shape
        pieces.append(data)
        return PackedWeight(kind, outputs, inputs, data)

    made: list[dict[str, PackedLowRank]] = []
    for layer in range(layers):
        own: dict[str, PackedLowRank] = {}
        for place, names in PRODUCTS.items():
            half_layer = "attention" if place in ("qkv", "o") else "mlp"
            parts = [factors.get(f"layers.{layer}.{half_layer}.{name}") for name in names]
            there = [low for low in parts if low is not None]
            if there:
                scale = torch.cat([torch.full((len(low.a),), low.scale) for low in there])
                b = tuple(None if low is None else packed(low.b) for low in parts)
                own[place] = PackedLowRank(packed(torch.cat([low.a for low in there])), scale.float(), b)
        made.append(own)
    memory = host_memory(sum(each.numel() for each in pieces))
    for piece, place in zip(pieces, memory.split([each.numel() for each in pieces]), strict=True):
        piece.set_(place.copy_(piece))
    return StackAdapter(made)
