"""``int4_matmul.cu`` for Python: the order of a weight that it reads, how it cuts a product up, and the call.

For up to 16 rows of X; see the head of ``int4_matmul.cu`` for what a block does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4_packing import GROUPS, unpack
from .jit import multiprocessors
from .small_matmul import SHARED, bind


def repack(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The order that ``int4_matmul.cu`` reads: done once, when a weight is loaded.

    Args:
        codes: uint8 ``[N, K / 2]`` from ``pack``.
        scale, zero: ``[N, K / G]``; rounded to bfloat16.

    Returns:
        codes int32 ``[B, K / 128, 4, 32, 2]`` for B = N / 16 blocks of rows (the last filled up with zeros): of each
        32 k, for every lane l of a warp, two words, one for each 16 k. A word holds rows l / 4 and l / 4 + 8, k = 2 (l
        % 4) and the next, and both 8 further: what the lane feeds to one product, in the order in which shifts by four
        bits bring it out. And scale and zero bfloat16 ``[B, K / 128, 128 / G, 8, 2, 2]``: rows r and r + 8, scale and
        zero.

    Raises:
        ValueError: K is not a multiple of 128.
    """
    n, half = codes.shape
    k, groups = 2 * half, scale.shape[1]
    if k % 128:
        raise ValueError(f"int4_matmul.cu: K must be a multiple of 128, not {k}")
    group, blocks = k // groups, -(-n // 16)
    whole = F.pad(unpack(codes, group).to(torch.int32), (0, 0, 0, blocks * 16 - n))
    #             block, row / 8, row % 8, chunk, 32 k, 16 k, 8 k, thread, pair
    parts = whole.view(blocks, 2, 8, k // 128, 4, 2, 2, 4, 2)
    words = torch.zeros((blocks, 8, k // 128, 4, 2, 4), dtype=torch.int32, device=codes.device)
    for below, right, odd in product(range(2), repeat=3):
        words |= parts[:, below, :, :, :, :, right, :, odd] << (4 * (below + 2 * right) + 16 * odd)
    words = words.permute(0, 2, 3, 1, 5, 4).reshape(blocks, k // 128, 4, 32, 2).contiguous()
    both = F.pad(torch.stack((scale, zero), -1).to(torch.bfloat16), (0, 0, 0, 0, 0, blocks * 16 - n))
    both = both.view(blocks, 2, 8, k // 128, 128 // group, 2).permute(0, 3, 4, 2, 1, 5).contiguous()
    return words, both


@dataclass(frozen=True, slots=True)
class Plan:
    """How ``int4_matmul.cu`` cuts a product up; the fields are the arguments of its launcher."""

    rows: int
    """Of X at a time."""
    columns: int
    """Rows of W in a group, in sixteens."""
    stages: int
    warps: int
    per: int
    """Sixteens of rows of W for a block."""
    ranks: int
    """Blocks of a cluster that share K."""


CUDA_ROWS = 16
"""Up to so many rows of X ``int4_matmul.cu`` is the quicker one; it takes more, sixteen at a time."""
KERNELS = {8: ((4, 3), (4, 2), (2, 3), (2, 2), (1, 3)), 16: ((2, 3), (2, 2), (1, 3))}
"""(columns, stages) that are compiled for each number of rows."""


def shared_bytes(plan: Plan, m: int, k: int, group: int) -> int:
    """Shared memory of a block."""
    held = min(m, plan.rows)
    steps = -(-(k // 128) // (plan.warps * plan.ranks))
    ring = plan.warps * plan.stages * plan.columns * (1024 + 128 // group * 64)
    sums = plan.warps * plan.rows * (plan.columns * 16 + 4) * (1 + (plan.per > plan.columns))
    part = held * (plan.per + plan.columns) * 16 if plan.ranks > 1 else 0
    return (
        ring
        + 4 * (sums + part + plan.warps * steps * (128 // group) * plan.rows)
        + (plan.warps * held * (steps * 256 + 16))
    )


def plan_codes(m: int, n: int, k: int, group: int, clusters: Mapping[int, int]) -> Plan:
    """A plan by a rule from times on an H200 (no search). ``clusters``: how many of each size run at once.

    A block keeps its part of X in shared memory, so a long K is shared by a cluster. Many warps hide the time between
    unpacking and multiplying; wide groups end less often, which pays where a block has many rows.

    Raises:
        ValueError: X does not fit the shared memory of eight blocks.
    """
    rows, sixteens = 8 if m <= 8 else 16, -(-n // 16)
    for ranks in (1, 2, 4, 8):
        per = -(-sixteens // max(1, clusters[ranks]))
        if rows == 16 and ranks == 1 and per <= 3:
            continue
        wide = [(4, 3, 8), (2, 3, 16), (4, 2, 8)] if per >= 28 else [(2, 2, 16), (4, 2, 8)]
        order = (wide if rows == 8 else [(2, 2, 16), (2, 3, 8), (2, 2, 8)]) + [(2, 2, 8), (1, 3, 8), (1, 3, 4)]
        for columns, stages, warps in order:
            plan = Plan(rows, columns, stages, warps, per, ranks)
            if columns <= per and shared_bytes(plan, m, k, group) <= SHARED:
                return plan
    raise ValueError(f"int4_matmul.cu: {m} rows of {k} do not fit in shared memory; use the Triton kernel")


class CudaCodes:
    """``int4_matmul`` by ``int4_matmul.cu``: ``packed`` for weights in its own order, or called as ``reference``.

    Raises:
        Unavailable: no NVIDIA GPU, or no nvcc to build the kernels with.
    """

    def __init__(self) -> None:
        self._launch = bind("int4_matmul", "transect_int4_matmul", "pppppiiiiliiiiiiip")
        at_once = bind("int4_matmul", "transect_int4_clusters", "i")
        hopper = torch.cuda.get_device_capability()[0] >= 9
        count = multiprocessors(torch.device("cuda", torch.cuda.current_device()))
        self._clusters = {1: count} | {size: at_once(size) if hopper else 0 for size in (2, 4, 8)}
        self._dependent = hopper
        self._plans: dict[tuple[int, int, int, int], Plan] = {}
        self._repacked: dict[int, tuple[weakref.ref[Tensor], int, tuple[Tensor, Tensor]]] = {}

    def packed(
        self, x: Tensor, words: Tensor, scales: Tensor, n: int, bias: Tensor | None = None, *, pdl: bool = False,
        plan: Plan | None = None,
    ) -> Tensor:  # fmt: skip
        """x bfloat16 ``[M, K]``, words and scales from ``repack`` of a weight of ``n`` rows -> ``[M, n]``.

        ``pdl``: as in ``small_matmul.CudaRows``.

        Raises:
            RuntimeError: the launch failed.
        """
        m, k = x.shape
        group = 128 // scales.shape[2]
        out = x.new_empty((m, n))
        if m == 0 or n == 0:
            return out
        key = (m, n, k, group)
        cut = plan or self._plans.get(key)
        if cut is None:
            cut = self._plans[key] = plan_codes(m, n, k, group, self._clusters)
        code = self._launch(
            x.data_ptr(), words.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            m, n, k, group, x.stride(0), cut.rows, cut.columns, cut.stages, cut.warps, cut.per, cut.ranks,
            (2 if pdl else 1) if self._dependent else 0, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"int4_matmul.cu: the launch of {cut} for {m} x {k} by {n} x {k} returned {code}")
        return out

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None, *, pdl: bool = False
    ) -> Tensor:
        """As ``reference``. A weight is repacked at its first call; the result is kept as long as ``codes`` lives.

        Raises:
            ValueError: see ``cuda_refuses``.
        """
        reason = cuda_refuses(x, codes, scale, zero, bias)
        if reason:
            raise ValueError(f"int4_matmul.cu: {reason}")
        held = self._repacked.get(id(codes))
        if held is None or held[0]() is not codes or held[1] != codes._version:
            key = id(codes)
            kept = weakref.ref(codes, lambda _: self._repacked.pop(key, None))
            held = self._repacked[id(codes)] = (kept, codes._version, repack(codes, scale, zero))
        return self.packed(x, *held[2], codes.shape[0], bias, pdl=pdl)


def cuda_refuses(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> str:
    """Why ``int4_matmul.cu`` does not take these arguments, or ``""``."""
    if any(t is not None and t.dtype != torch.bfloat16 for t in (x, scale, zero, bias)):
        return "it computes in bfloat16, scales and zeros included"
    if x.shape[1] % 128 or x.shape[1] != 2 * codes.shape[1] or x.shape[1] // scale.shape[1] not in GROUPS:
        return f"K must be a multiple of 128, and a group one of {GROUPS}"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "it reads 16 bytes of x at a time: the rows' stride and the address must be multiples of 16 bytes"
    return ""
