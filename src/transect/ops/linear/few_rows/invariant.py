r"""Products of up to 256 rows whose rows do not depend on each other, at the speed of ``hopper.py``.

    Y = X W^T + b        or, with a gate,        Y = silu(X V^T) * (X U^T), where W is V above U

Shapes as in ``hopper.py``; bfloat16 on Hopper. Bound by the bytes of W.

An output's products are added in one order, whatever the number of rows: K is cut into ``fixed_order.parts_of`` equal
parts, a number that depends on the weight's shape alone; within a part, products are added in the order of k, in steps
of 16, by Hopper's tensor-core instruction; parts are added in order. Neither the size of a tile, nor the operand that
is on its left, nor the number of blocks changes these bits. Of the tilings of ``hopper.py`` that keep this order,
``rule.py`` names the fastest: either every part has a block of its own (``ranks``), or one block sums all (``order``).

More rows, other dtypes and other GPUs run by ``fixed_order.py``, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ...lang.jit import multiprocessors
from ...registry import Unavailable
from .. import fixed_order
from . import hopper, rule
from .hopper import COMPILED, INVARIANT, HopperRows, HopperTiling

log = logging.getLogger(__name__)
KERNELS = (*COMPILED, *INVARIANT)


class InvariantRows:
    """Products of any number of rows. Launches share counters, so those of one instance must be on
    one stream."""

    def __init__(self) -> None:
        self._rows: dict[torch.device, HopperRows | None] = {}

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dependent_launch: bool = False
    ) -> Tensor:
        """Compute ``linear.reference``; ``dependent_launch`` means the same as in ``HopperRows``."""
        rows, parts = self._rows_for(x, weight, bias), fixed_order.parts_of(x, weight.shape[0])
        found = rows and tiling_of(len(x), *weight.shape, parts, False, multiprocessors(x.device))
        if not rows or not found:
            return fixed_order.product(x, weight, bias)
        tiling, order = found
        return rows(x, weight, bias, dependent_launch=dependent_launch, tiling=tiling, order=order)

    def gated(self, x: Tensor, weight: Tensor, *, dependent_launch: bool = False) -> Tensor:
        """Compute ``gate_up.reference`` without bias; ``dependent_launch`` means the same as in ``HopperRows``."""
        rows = self._rows_for(x, weight)
        found = rows and tiling_of(len(x), *weight.shape, 1, True, multiprocessors(x.device))
        if not rows or not found:
            return fixed_order.gated(x, weight)
        return rows(x, weight, dependent_launch=dependent_launch, tiling=found[0])

    def _rows_for(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> HopperRows | None:
        """Return the kernels if they take these arguments; they are built at the first call of any number of rows."""
        device = x.device
        if device not in self._rows:
            self._rows[device] = _built(device)
        refused = not len(x) or weight.shape[0] % 16 or hopper.refusal(x, weight, bias)
        return None if refused else self._rows[device]


def _built(device: torch.device) -> HopperRows | None:
    if not fixed_order.on_hopper(device):
        return None
    try:
        return HopperRows(device)
    except Unavailable as reason:
        log.warning("products of up to 256 rows run a Triton kernel, which is slower: %s", reason)
        return None


@lru_cache(maxsize=4096)
def tiling_of(m: int, n: int, k: int, parts: int, gated: bool, units: int) -> tuple[HopperTiling, int] | None:
    """Return the tiling of least predicted time for m rows by a weight of n x k, and its ``order``; None if there is
    none."""
    columns = n // 2 if gated else n
    return min(
        candidates(m, columns, k, parts, gated=gated, units=units),
        key=lambda found: rule.seconds(found[0], m, columns, k, units),
        default=None,
    )


def candidates(
    m: int, n: int, k: int, parts: int = 1, *, gated: bool = False, units: int = 132
) -> Iterator[tuple[HopperTiling, int]]:
    """Yield the tilings for m rows, n columns of Y and K = k that add ``parts`` of K in order, with their ``order``."""
    for compiled in hopper.fitting(m, gated, KERNELS):
        pair, blocks = compiled[5], compiled[6]
        for resident in (1, 2) if blocks == 2 else (1,):
            stages = hopper.stages_of(compiled, k, hopper.SHARED if resident == 1 else hopper.SHARED // 2 - 2048)
            whole = HopperTiling(*compiled, 1, 0, stages)
            tiles, slots = whole.tiles(n), resident * (units // pair)
            shares = {1} if parts == 1 else {parts, -parts} if tiles * parts <= slots else {parts}
            found = [HopperTiling(*compiled, ranks, 0, stages) for ranks in sorted(shares)]
            if parts == 1:
                even = [tiles // per for per in (1, 2, 3, 4, 6, 8) if tiles % per == 0 and tiles // per <= slots]
                found += [HopperTiling(*compiled, 0, clusters, stages) for clusters in even]
            for tiling in found:
                if not tiling.refusal(m, n, k, kernels=KERNELS):
                    yield tiling, 1
            if parts > 1 and whole.ordered and not whole.refusal(m, n, k, kernels=KERNELS):
                yield whole, parts
