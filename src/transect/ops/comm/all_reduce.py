r"""Sums over ranks, alone or with the residual add and RMSNorm that follow, through memory that GPUs share.

    sum = x_0 + x_1 + ... + x_(R-1)                          in this order, in float32, rounded once
    s = residual + sum            y = rms_norm(s) * w        if a residual is given (see ``norm/add_rms_norm.py``)

Every rank writes straight into the memory of the others (NVLink, or PCIe). What has not come yet looks like a NaN that
is never sent, so a reader sees when it has all, and puts the NaN back. So a sum of few bytes takes one way over the
link: no barrier, no fence, no second message, no flags. All ranks add in the same order, so they have the same bits.

* one-shot: every rank gives all it has to every other, and each of them sums everything: (R - 1) S bytes leave a rank;
* two-shot: every rank sums one R-th, and gives that to all: 2 (R - 1) / R S bytes, and two ways over the link. For two
  ranks that is as many bytes as one-shot.

Which way a sum goes depends on its bytes alone (``in_two_shots``).

Shapes: parts ``[R, T, D]``, what each rank has; residual and the results ``[R, T, D]``, the same on every rank; weight
``[D]``. On one GPU that plays all ranks (tests) this is the operator; between GPUs each rank has its ``[T, D]``.
Sources: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", for the two
ways; a value that is never sent in place of flags as in the all-reduce of TensorRT-LLM (NVIDIA, "Lamport" buffers).

Bound by the links: at 450 GB/s each way, 8 KiB take 0.04 us, and the way there about 1 us. On one GPU, by bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.memory.shared import STATE, in_two_shots, lines_for, sums_bytes
from ...costs.work import Cost
from ..lang.cuda import bind, in_cuda
from ..norm import add_rms_norm
from ..numerics import compute_dtype, sample
from ..registry import Case, Op, in_torch, register

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_RANKS = 8
MOST_NORM_BYTES = 512 * 2 * 16
"""Bytes of the longest row that can be normalised: the registers of a block hold no more."""
FLAT = 512
"""Vectors of 16 bytes that a block takes at a time where nothing is normalised."""

SIGNATURE = "piiilpppppplifiiiiip"


def reference(
    parts: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Reduce parts ``[R, T, D]`` to the sums on every rank ``[R, T, D]``; with a residual ``[T, D]`` and a weight
    ``[D]`` return (norm, residual + sum), each ``[R, T, D]``."""
    total = parts[0].to(compute_dtype(parts.dtype))
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    total = total.to(parts.dtype)
    if residual is None or weight is None:
        return total.expand(parts.shape)
    found = add_rms_norm.reference(total, residual, weight, eps)
    return found[0].expand(parts.shape), found[1].expand(parts.shape)


def refusal(x: Tensor, ranks: int, lines: int, norm: bool) -> str | None:
    """Return the reason that the kernels cannot sum ``x`` ``[..., D]`` over ``ranks`` ranks, or None."""
    if x.dtype not in DTYPES:
        return f"all_reduce: {x.dtype} has no kernel; there are {', '.join(map(str, DTYPES))}"
    if x.nbytes % 16 or not x.is_contiguous() or x.data_ptr() % 16:
        return "all_reduce: the tensor must be contiguous, begin at a multiple of 16 bytes, and have whole 16 bytes"
    vectors = x.nbytes // 16
    if vectors < ranks:
        return f"all_reduce: {x.nbytes} bytes are less than 16 for each of {ranks} ranks"
    row = x.shape[-1] * x.itemsize if x.ndim else 0
    if norm and (row % 16 or row > MOST_NORM_BYTES):
        return f"all_reduce: rows to be normalised have whole 16 bytes, {MOST_NORM_BYTES} at most, not {row}"
    share = -(-vectors // ranks) if in_two_shots(ranks, x.nbytes) else vectors
    if ranks * share > lines:
        return f"all_reduce: {x.nbytes} bytes are more than the ranks' memory takes at once"
    return None


class Peers:
    """The memory of all ranks, as one of them sees it, and sums by it.

    Args:
        memory: address of each rank's memory, with empty lines to begin with.
        rank: the own place among them.
        lines: of a region.
        stop: int32 ``[1]`` in pinned memory of the host, 0; another value ends all waiting, and sums are then invalid.
        played: number of ranks that this GPU simulates; more than one only to test the kernels.

    Raises:
        Unavailable: no GPU, or nothing to build the kernels with.
    """

    def __init__(self, memory: Sequence[int], rank: int, lines: int, stop: Tensor, played: int = 1) -> None:
        self.ranks, self.rank, self.lines, self.stop, self.played = len(memory), rank, lines, stop, played
        self._memory = (ctypes.c_void_p * len(memory))(*memory)
        self._launch = bind("all_reduce", "transect_all_reduce", SIGNATURE)

    def refusal(self, x: Tensor, norm: bool = False) -> str | None:
        """Return the reason, as a sentence, why the kernels do not take ``x`` ``[..., D]``; None if they do."""
        return refusal(x, self.ranks, self.lines, norm)

    def sum(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        dependent_launch: bool = False,
        delay: int = 0,
    ) -> Tensor:
        """Return the sum of every rank's ``x``; ``out`` may be ``x`` itself.

        ``dependent_launch``: begin while the kernel before still runs (Hopper). ``delay``: the most
        nanoseconds to wait at several places, for tests.

        Raises:
            ValueError: ``refusal`` gives the reason.
        """
        self._check(x, False)
        out = torch.empty_like(x) if out is None else out
        self._run(x, None, None, out, None, 0.0, dependent_launch, delay)
        return out

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        dependent_launch: bool = False,
        delay: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return (RMSNorm of total, total) with total = residual + the sum of every rank's ``x``.

        Raises:
            ValueError: ``refusal`` gives the reason, or the tensors do not fit each other.
        """
        self._check(x, True)
        if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
            raise ValueError(f"all_reduce: the residual must be as x, contiguous: {list(x.shape)} {x.dtype}")
        if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or not weight.is_contiguous():
            raise ValueError(f"all_reduce: the weight must be [{x.shape[-1]}] {x.dtype}")
        normed, total = torch.empty_like(x), torch.empty_like(x)
        self._run(x, residual, weight, normed, total, eps, dependent_launch, delay)
        return normed, total

    def _check(self, x: Tensor, norm: bool) -> None:
        if reason := self.refusal(x[0] if self.played > 1 else x, norm):
            raise ValueError(reason)

    def _run(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
        total: Tensor | None,
        eps: float,
        dependent_launch: bool,
        delay: int,
    ) -> None:
        nbytes = x.nbytes // self.played
        width = FLAT if residual is None else x.shape[-1] * x.itemsize // 16
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (x, residual, weight, out, total)]
        code = self._launch(
            ctypes.addressof(self._memory), self.ranks, self.rank, self.played, self.lines, self.stop.data_ptr(),
            *pointers, nbytes // 16, width, eps, DTYPES[x.dtype], residual is not None,
            in_two_shots(self.ranks, nbytes), dependent_launch, delay,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"all_reduce.cu returned {code}" + (": not a shape it takes" * (code == -1)))


def played_by_one(ranks: int, device: torch.device, lines: int) -> tuple[Peers, list[Tensor]]:
    """Simulate ranks that all use this GPU; return them and their memory, which must stay alive."""
    memory = [torch.full((sums_bytes(lines),), 255, dtype=torch.uint8, device=device) for _ in range(ranks)]
    for each in memory:
        each[:STATE] = 0
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return Peers([each.data_ptr() for each in memory], 0, lines, stop, played=ranks), memory


@cache
def _played(ranks: int, device: torch.device, lines: int) -> tuple[Peers, list[Tensor]]:
    """Return the ranks of ``played_by_one`` for all launches of a size: also those that a CUDA graph repeats."""
    return played_by_one(ranks, device, lines)


def _refusal(
    parts: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0
) -> str | None:
    if parts.ndim < 2 or not 2 <= len(parts) <= MOST_RANKS:
        return f"all_reduce: parts of 2 to {MOST_RANKS} ranks are needed, not {list(parts.shape)}"
    lines = lines_for(len(parts), parts[0].nbytes)
    return refusal(parts[0].contiguous(), len(parts), lines, residual is not None)


def cuda_all_reduce(
    parts: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``reference`` by the kernels, with one GPU as all ranks.

    Raises:
        ValueError: ``refusal`` gives the reason.
    """
    if reason := _refusal(parts, residual, weight, eps):
        raise ValueError(reason)
    peers, _ = _played(len(parts), parts.device, lines_for(len(parts), parts[0].nbytes))
    if residual is None or weight is None:
        found: Any = peers.sum(parts.contiguous())
    else:
        stream = residual.expand(parts.shape).contiguous()
        found = peers.add_norm(parts.contiguous(), stream, weight.contiguous(), eps)
    return found


def cost(parts: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0) -> Cost:
    """Return the cost over all ranks: each part read once by each rank, results written by each."""
    ranks, more = len(parts), 0 if residual is None or weight is None else 1
    flops = parts.numel() * (ranks - 1 + 5 * more)
    read = parts.nbytes * ranks + more * (parts.nbytes + (0 if weight is None else ranks * weight.nbytes))
    return Cost(flops, read, parts.nbytes * (1 + more))


def _by_torch(
    parts: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Reduce on one GPU with torch; between GPUs the peer is NCCL's all-reduce (``transect bench collectives``)."""
    total = parts.sum(0)
    if residual is None or weight is None:
        return total
    total = total + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def _examples() -> Sequence[dict[str, Any]]:
    alone = [{"parts": sample(*shape)} for shape in ((2, 3, 8), (4, 1, 32), (8, 5, 40), (3, 7, 64))]
    normed = [
        {
            "parts": sample(ranks, rows, width),
            "residual": sample(rows, width, seed=2),
            "weight": sample(width, seed=1),
            "eps": 1e-5,
        }
        for ranks, rows, width in ((2, 1, 64), (2, 9, 4096), (4, 3, 576))
    ]
    return [*alone, *normed]


def _cases() -> Sequence[Case]:
    def case(rows: int, width: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            parts = torch.randn(2, rows, width, **like)
            residual, weight = torch.randn(rows, width, **like), torch.randn(width, **like)
            return {"parts": parts, "residual": residual, "weight": weight, "eps": 1e-5}

        return Case(f"two ranks on one GPU, {rows} tokens x {width}", make)

    return [case(1, 4096), case(64, 4096)]


register(
    Op(
        name="all_reduce",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "cuda": in_cuda("all_reduce", cuda_all_reduce, batch_invariant=True, refusal=_refusal),
        },
        examples=_examples,
        peers={"torch": _by_torch},
        directions=("forward",),
        cases=_cases,
    )
)
