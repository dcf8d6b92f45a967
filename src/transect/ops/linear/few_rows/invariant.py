r"""Products of up to 256 rows whose rows do not depend on each other, at the speed of ``hopper.py``.

    Y = X W^T + b        or, with a gate,        Y = silu(X V^T) * (X U^T), where W is V above U

Shapes as in ``hopper.py``; bfloat16 on Hopper. Bound by the bytes of W.

An output's products are added in one order, whatever the number of rows: K is cut into ``fixed_order.parts_of`` equal
parts, a number that depends on the weight's shape alone; within a part, products are added in the order of k, in steps
of 16, by Hopper's tensor-core instruction; parts are added in order. Neither the size of a tile, nor the operand that
is on its left, nor the number of blocks changes these bits, nor the instruction: Hopper's (wgmma) and that of single
warps (mma.sync) round alike. So a part of K may have a block of its own (``ranks`` of ``hopper.py``), a warp
(``small_matmul.cu``), or follow the one before in the same block (``order``). The fastest of these ways is measured
(``choices.py``), or the one that ``by_rule`` names.

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
from . import choices, cuda, hopper, rule
from .cuda import COMPILED, CUDA_ROWS, CudaRows, CudaTiling, quicker
from .hopper import CHUNK, INVARIANT, HopperRows, HopperTiling

log = logging.getLogger(__name__)
KERNELS = (*hopper.COMPILED, *INVARIANT)
LEAST_ROWS = 32
"""Fewest rows to which the rule's times are fitted well enough to choose by."""
MANY_TILES = 4
"""Fewest tiles a cluster at which clusters may have different numbers of whole tiles."""
IN_FLIGHT = 64 * 1024
"""Bytes of a weight that a block of ``small_matmul.cu`` asks for ahead, if it can."""


Tiling = HopperTiling | CudaTiling


class InvariantRows:
    """Products of any number of rows. Launches of one instance share counters, so they must be on one stream."""

    def __init__(self) -> None:
        self._kernels: dict[torch.device, tuple[CudaRows, HopperRows] | None] = {}

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dependent_launch: bool = False
    ) -> Tensor:
        """Compute ``linear.reference``; ``dependent_launch`` means the same as in ``HopperRows``."""
        parts = fixed_order.parts_of(x, weight.shape[0])
        y = self._few(x, weight, bias, parts, dependent_launch=dependent_launch)
        return fixed_order.product(x, weight, bias, parts=parts) if y is None else y

    def gated(self, x: Tensor, weight: Tensor, *, dependent_launch: bool = False) -> Tensor:
        """Compute ``gate_up.reference`` without bias; ``dependent_launch`` means the same as in ``HopperRows``."""
        y = self._few(x, weight, None, 1, gated=True, dependent_launch=dependent_launch)
        return fixed_order.gated(x, weight) if y is None else y

    def _few(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, *, gated: bool = False, dependent_launch: bool
    ) -> Tensor | None:
        """Compute a product by the kernels for few rows; None if they do not take these arguments. The kernels are
        built at the first call of any number of rows."""
        device = x.device
        if device not in self._kernels:
            self._kernels[device] = _built(device)
        kernels = self._kernels[device]
        if kernels is None or not len(x) or weight.shape[0] % 16 or hopper.refusal(x, weight, bias):
            return None
        tiling = tiling_of(len(x), *weight.shape, parts, gated, device)
        return None if tiling is None else run(*kernels, x, weight, bias, tiling, parts, dependent_launch, gated)


def run(
    few: CudaRows,
    wide: HopperRows,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiling: Tiling,
    parts: int,
    dependent_launch: bool = False,
    gated: bool = False,
) -> Tensor:
    """Launch one of ``candidates``."""
    if isinstance(tiling, CudaTiling):
        return few(x, weight, bias, dependent_launch=dependent_launch, tiling=tiling, gated=gated)
    order = parts if tiling.ranks == 1 else int(tiling.ranks != 0)
    keep = not gated and kept(len(x), *weight.shape)
    return wide(x, weight, bias, dependent_launch=dependent_launch, tiling=tiling, order=order, keep=keep)


def kept(m: int, n: int, k: int) -> bool:
    """Return True for more than 96 rows by a weight of the shape of q, k and v's, the last before attention.

    Attention of 256 rows takes 10 us less (of 258) if the L2 cache does not drop that weight first (one H200); why is
    not known. With 64 rows a layer takes 1 us longer.
    """
    return m > 96 and k < n <= 3 * k


def _built(device: torch.device) -> tuple[CudaRows, HopperRows] | None:
    if not fixed_order.on_hopper(device):
        return None
    try:
        return CudaRows(), HopperRows(device)
    except Unavailable as reason:
        log.warning("products of up to 256 rows run a Triton kernel, which is slower: %s", reason)
        return None


@lru_cache(maxsize=4096)
def tiling_of(m: int, n: int, k: int, parts: int, gated: bool, device: torch.device) -> Tiling | None:
    """Return the tiling for m rows by a weight of n x k: measured, or else by rule; None if there is none."""
    if not 0 < m <= hopper.MOST_ROWS:
        return None
    if device.type == "cuda":
        name = choices.key(m, n, k, gated, invariant=True)
        found = choices.choices(torch.cuda.get_device_name(device)).get(name)
        units = multiprocessors(device)
        if found is not None and found.tiling in candidates(m, n, k, parts, gated=gated, units=units):
            return found.tiling  # type: ignore[no-any-return]
        return by_rule(m, n, k, parts, gated, units)
    return by_rule(m, n, k, parts, gated)


def by_rule(m: int, n: int, k: int, parts: int, gated: bool, units: int = 132) -> Tiling | None:
    """Return the tiling for m rows by a weight of n x k that no choice is measured for; None if there is none.

    ``small_matmul.cu`` runs for parts of K and where ``cuda.quicker`` says so, in wide groups. Else ``hopper.py`` runs
    by the tiling of least predicted time, the same for 1 to 32 rows.
    """
    columns, rows = n // 2 if gated else n, max(m, LEAST_ROWS)
    found = list(candidates(m, n, k, parts, gated=gated, units=units))
    few = [tiling for tiling in found if isinstance(tiling, CudaTiling)]
    if few and (parts > 1 or quicker(m, n, k)):
        return max(few, key=lambda tiling: (min(ahead(tiling), IN_FLIGHT), tiling.wide, tiling.columns, -tiling.stages))
    wide = [tiling for tiling in found if isinstance(tiling, HopperTiling)]
    return min(wide, key=lambda tiling: rule.seconds(tiling, rows, columns, k, units), default=None)


def candidates(m: int, n: int, k: int, parts: int = 1, *, gated: bool = False, units: int = 132) -> Iterator[Tiling]:
    """Yield the tilings for m rows by a weight of n x k that add ``parts`` of K in order."""
    columns = n // 2 if gated else n
    if k % (CHUNK * parts) == 0 and n % 16 == 0 and m <= CUDA_ROWS:
        per = -(-n // (16 * units))
        for across, stages, wide in COMPILED:
            groups = -(-per // across)
            at_once = -(-groups // -(-groups // (cuda.MOST_WARPS // parts)))
            few = CudaTiling(across, stages, per, parts * at_once, -parts, wide)
            if across <= per and k % (CHUNK * parts * wide) == 0 and not few.refusal(m, gated):
                yield few
    for compiled in hopper.fitting(m, gated, KERNELS):
        pair, blocks = compiled[5], compiled[6]
        for resident in (1, 2) if blocks == 2 else (1,):
            stages = hopper.stages_of(compiled, k, hopper.SHARED if resident == 1 else hopper.SHARED // 2 - 2048)
            whole = HopperTiling(*compiled, 1, 0, stages)
            tiles, slots = whole.tiles(columns), resident * (units // pair)
            found = [whole] if parts == 1 or whole.ordered else []
            if parts == 1:
                even = [tiles // per for per in (1, 2, 3, 4, 6, 8) if tiles % per == 0 and tiles // per <= slots]
                even += [slots] * (tiles >= MANY_TILES * slots)
                found += [HopperTiling(*compiled, 0, clusters, stages) for clusters in even]
            else:
                shares = (parts, -parts) if tiles * parts <= slots else (parts,)
                found += [HopperTiling(*compiled, ranks, 0, stages) for ranks in shares]
            for tiling in found:
                if not tiling.refusal(m, columns, k, kernels=KERNELS):
                    yield tiling


def ahead(tiling: CudaTiling) -> int:
    """Return the bytes of a weight that a block asks for ahead."""
    return tiling.warps * (tiling.stages - tiling.wide) * tiling.columns * 16 * 2 * CHUNK
