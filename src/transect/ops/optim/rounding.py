r"""float32 to bfloat16 by chance, so that a sum of many small steps is kept where each of them is too small to show.

    y = the bfloat16 above x with probability p, else the one below        p = (x - below) / (above - below)

So E[y] = x. A bfloat16 has 8 significant bits: with the nearest one, a step of less than a 512th of a weight is lost in
every step, and such a weight never moves.

The lower 16 bits of x are p in units of 2^-16. 16 random bits are added to them, and what is left of the sum's lower
half is cut off: a carry is "above". Infinities and NaN stay what they are.

The bits are Philox words (``lang/philox.py``) of (seed; element, step, tensor): the same on every device, and in a run
that was taken up again. The weight and the two moments of an element share one word and use 16 bits of it each, which
overlap: each of them is rounded without bias, and what they have in common never meets in one sum.

Shapes: any; x float32. No gradient.
Source: Gupta et al. 2015, arXiv:1502.02551; for weights in bfloat16: Zamirai et al. 2020, arXiv:2010.06192.

Bound by bytes where the device makes a word (some 100 integer operations for four elements) faster than it moves 6
bytes an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cpu.training import kernels
from ..lang.jit import kernel, tl
from ..lang.philox import WORD, philox4x32, words_of
from ..registry import Unavailable

ROUND_STREAM = 2
"""Philox's stream for rounding; ``lang/philox.py`` has those of sampling."""
WEIGHT, SECOND, FIRST = 0, 8, 16
"""First bit of the 16 taken from the word: for a weight, its second and its first moment."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Random bits of parameter number ``tensor`` of a run with ``seed``, in optimizer step ``step``."""

    seed: int
    step: int
    tensor: int


def reference(x: Tensor, draws: Draws, first: int = 0, shift: int = WEIGHT) -> Tensor:
    """Return bfloat16 in the shape of ``x`` (float32, on any device).

    Args:
        first: the number of the first element within its parameter.
        shift: ``WEIGHT``, ``SECOND`` or ``FIRST``.
    """
    ids = torch.arange(first, first + x.numel(), dtype=torch.int64)
    up = torch.from_numpy(((words(ids.numpy(), draws) >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int32))
    bits = x.float().contiguous().view(torch.int32)
    cut = ((bits + up.to(x.device).view(x.shape)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isfinite(), cut, x.to(torch.bfloat16))


def words(ids: np.ndarray, draws: Draws) -> np.ndarray:
    """Return the 32-bit word of each element, uint64."""
    quarters, lanes = (ids.astype(np.uint64) >> np.uint64(2)), (ids & 3).astype(np.int64)
    one = np.ones_like(quarters)
    counter = (quarters, one * (draws.step & WORD), one * (draws.tensor & WORD), one * ROUND_STREAM)
    key = (one * (draws.seed & WORD), one * ((draws.seed >> 32) & WORD))
    made = np.stack(philox4x32(counter, key), axis=-1)
    found: np.ndarray = np.take_along_axis(made, lanes[..., None], axis=-1)[..., 0]
    return found


def round_into(out: Tensor, x: Tensor, draws: Draws, first: int = 0, shift: int = WEIGHT) -> None:
    """Write ``reference(x, ...)`` to ``out``, contiguous bfloat16: on the CPU by the C++ kernel, where it can be built.

    Args:
        first: as in ``reference``, a multiple of 4.
    """
    native = _native() if x.device.type == "cpu" and x.is_contiguous() and out.is_contiguous() else None
    if native is None or first % 4:
        out.copy_(reference(x, draws, first, shift))
    else:
        native(x, out, first, draws.seed, draws.step, draws.tensor, shift)


def _native() -> Callable[..., None] | None:
    try:
        return kernels(torch.get_num_threads()).round_by_chance
    except Unavailable:
        return None


@kernel
def block_words(block, step, tensor, low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute, in a kernel, the words of the BLOCK elements from ``block * BLOCK`` on, in their order."""
    quarter = block.to(tl.uint32) * (BLOCK // 4) + tl.arange(0, BLOCK // 4).to(tl.uint32)
    w0, w1, w2, w3 = words_of(quarter, step, tensor, low, high, 2)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@kernel
def rounded(x, word, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round, in a kernel, float32 ``x`` to bfloat16, by 16 bits of ``word``."""
    bits = x.to(tl.uint32, bitcast=True)
    special = (bits & 0x7F800000) == 0x7F800000
    up = tl.where(special, 0, (word >> SHIFT) & 0xFFFF)
    quiet = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x40, 0)
    return (((bits + up) >> 16) | quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
