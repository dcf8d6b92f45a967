r"""``LowRank``: the factors of an adapter beside a matrix, in the form of files.

    W' = W + s B A                       LoRA (Hu et al. 2021, arXiv:2106.09685)
    W' = m / ||W + s B A|| (W + s B A)   DoRA (Liu et al. 2024, arXiv:2402.09353), norms of rows

Shapes: O outputs, I inputs, r the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
