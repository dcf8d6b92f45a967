"""The possible values of a matrix in 4 bits, and their choice.

Shapes: O outputs, I inputs, g columns of a group, G = I / g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.ggml_search import affine_scale, symmetric_scale

LOWEST, HIGHEST = 0, 15


@dataclass(frozen=True, slots=True)
class Grid:
    """Possible values of a matrix: ``scale (code - zero)`` with codes 0 to 15. scale and zero ``[O, G]`` float32, zeros
    whole numbers."""

    scale: Tensor
    zero: Tensor

    @property
    def groups(self) -> int:
        """Number of groups in a row."""
        return self.scale.shape[1]

    @classmethod
    def below(cls, grids: Sequence[Grid]) -> Grid:
        """Concatenate the grids of matrices along their rows."""
        return cls(torch.cat([each.scale for each in grids]), torch.cat([each.zero for each in grids]))

    def codes(self, values: Tensor) -> Tensor:
        """Return the nearest codes of ``[O, I]``, int32 ``[O, I]``."""
        size = values.shape[1] // self.groups
        wide = values.float().unflatten(1, (-1, size)) / self.scale[..., None] + self.zero[..., None]
        return wide.round_().clamp_(LOWEST, HIGHEST).to(torch.int32).flatten(1)


def grid_of(weight: Tensor, group: int, weights: Tensor, dtype: torch.dtype, *, symmetric: bool) -> Grid:
    """Return the grid for ``[O, I]`` with the smallest error when each number is rounded to the nearest code.

    Args:
        weights: weight of each column's square error, ``[I]``.
        dtype: in which scales are stored.
        symmetric: every zero is 8.
    """
    outputs, inputs = weight.shape
    x = weight.float().reshape(-1, group).numpy()
    counts = weights.float().expand(outputs, inputs).reshape(-1, group).numpy()
    if symmetric:
        scale = torch.from_numpy(symmetric_scale(x, counts, 8, signed=False))
        zero = torch.full_like(scale, 8.0)
    else:
        scale, low = (torch.from_numpy(each) for each in affine_scale(x, counts, HIGHEST, below=True))
        beneath = -low > scale * (HIGHEST + 0.5)  # the whole group is negative
        scale = torch.where(beneath, -low / HIGHEST, scale)
        zero = torch.where(scale > 0, -low / scale, torch.zeros_like(low)).round().clamp(LOWEST, HIGHEST)
    smallest = torch.finfo(dtype).smallest_normal
    scale = scale.clamp(min=max(1e-8, smallest)).to(dtype).float()
    return Grid(scale.view(outputs, -1), zero.view(outputs, -1))
