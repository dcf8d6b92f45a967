r"""Products of any number of rows in one order of sums, by the tiles of ``many_rows/``: a row's result does not depend
on the number of rows.

    Y = X W^T + b        or, with a gate,        Y = silu(X V^T) * (X U^T), where W is V above U

K is cut into ``parts_of`` equal parts. Within a part an output's products are added in the order of k, in steps of 16,
by the same tensor-core instruction; parts are added in order. On Hopper ``few_rows/invariant.py`` has the same bits
faster, for up to 256 rows. Shapes and bounds are those of ``linear.py`` and ``gate_up.py``, which offer both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...hardware.device import target_of
from ..lang.jit import INTERPRETED

if TYPE_CHECKING:
    from .many_rows.tiling import ManyRowsTiling

PARTS, NARROW = 4, 8192
"""Most parts of K of a narrow weight (``parts_of``), and its most outputs."""
FEWER, SHORT = 4096, 8192
"""A narrow weight of more outputs than the one and fewer inputs than the other has half as many parts."""


def parts_of(x: Tensor, outputs: int) -> int:
    """Return the number of parts of K that invariant products of x ``[T, I]`` sum apart and then add in order.

    It depends on the weight's shape, the dtype and the GPU, not on the number of rows.
    """
    if INTERPRETED or x.dtype != torch.bfloat16 or not on_hopper(x.device):
        return 1
    return parts_on_hopper(outputs, x.shape[1])


def parts_on_hopper(outputs: int, inputs: int) -> int:
    """Return ``parts_of`` on Hopper, in bfloat16.

    A narrow weight has several, which as many blocks can share: with one, the blocks for 64 rows would take in X too
    often. Tiles of many rows are then smaller, because they hold two sums; and two parts are enough to keep all blocks
    busy if there are more than 64 sixty-fours of outputs.
    """
    parts = PARTS // 2 if outputs > FEWER and inputs < SHORT else PARTS
    return parts if outputs <= NARROW and inputs % (64 * parts) == 0 else 1


def on_hopper(device: torch.device) -> bool:
    """Return True for a Hopper GPU."""
    return device.type == "cuda" and target_of(device).hopper


def tiling_of(x: Tensor, outputs: int, parts: int = 1, gated: bool = False) -> ManyRowsTiling:
    """Return the tiling of ``product`` for x ``[T, I]``.

    Tilings depend on the number of rows, but no sum does: in every tile an output's products are added in the order of
    k, in steps of 16, by the same tensor-core instruction (Hopper's takes at least 64 rows, hence tiles of 64 even for
    one row). ``parts`` of K are summed apart, in every tile the same.
    """
    from .many_rows.tiling import SMALL, ManyRowsTiling

    rows = x.shape[0]
    if INTERPRETED:
        return SMALL
    if x.element_size() == 4:
        return ManyRowsTiling(bm=64 if rows > 32 else 16, bn=64, bk=32, warps=4)
    hopper = target_of(x.device).bulk_copies
    narrow = outputs <= 8192
    if rows <= 64:
        tiling = ManyRowsTiling(bm=64, bn=32 if narrow else 64, bk=128, warps=4, stages=5 if narrow else 4)
    elif rows <= 128:
        tiling = ManyRowsTiling(bm=128, bn=32 if narrow else 64, bk=128, warps=8, stages=4 if narrow else 3)
    elif rows <= 512:
        tiling = ManyRowsTiling(bm=128, bn=64 if narrow or gated else 128, bk=64, warps=8, stages=4)
    else:
        tiling = ManyRowsTiling(bm=128, bn=128 if gated else 256, bk=64, warps=8, stages=4, halves=not gated)
    if parts > 1:
        tiling = replace(tiling, bn=min(tiling.bn, 128), bk=64, parts=parts, halves=False)
    if not hopper:
        return replace(tiling, bn=min(tiling.bn, 64 if gated else 128), bk=64, stages=3, halves=False)
    return replace(tiling, persistent=True)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, parts: int | None = None) -> Tensor:
    """Compute ``x W^T + b`` on the GPU: x ``[T, I]``, weight ``[O, I]``, bias ``[O]`` -> ``[T, O]``.

    ``parts``: by default ``parts_of``.
    """
    from .many_rows import matmul

    rows, outputs = x.shape[0], weight.shape[0]
    tiling = tiling_of(x, outputs, parts or parts_of(x, outputs))
    return matmul.matmul(whole_tile(x), weight, bias, tiling=tiling)[:rows]


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``silu(X V^T) * (X U^T)`` on the GPU: x ``[T, I]``, weight ``[2 F, I]`` -> ``[T, F]``."""
    from .many_rows import matmul

    rows = x.shape[0]
    gate, up = weight.chunk(2)
    return matmul.matmul(whole_tile(x), up, gate=gate, tiling=tiling_of(x, up.shape[0], gated=True))[:rows]


def whole_tile(x: Tensor) -> Tensor:
    """Pad x with rows of zeros to 64 if there are fewer, because bulk copies past the end of a tensor are slow: an
    output head of an 8B model with 8 rows takes 522 us without padding and 275 with it (H200)."""
    short = 64 - x.shape[0]
    return x if short <= 0 or x.element_size() == 4 or INTERPRETED else F.pad(x, (0, 0, 0, short))
