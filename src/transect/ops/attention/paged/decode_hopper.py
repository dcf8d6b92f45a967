r"""Attention of decode rows over a paged cache on Hopper GPUs, in CUDA C++ (``paged_decode_hopper.cu``).

The math and the arguments are those of ``paged_attention.py``; this is its case of one query a row, with a cache in
bfloat16 or in fp8 (e4m3), which is decoded in registers, exactly. With G query heads to a key head that is 4 G d FLOPs
for 4 d bytes of bfloat16 (2 d of fp8), far below what the tensor cores do meanwhile. So the only task is to keep memory
busy until the last byte.

* The unit of work is a block of the cache for one key head, two contiguous pieces of memory. The units of all rows and
  heads stand in one line that is cut evenly, whatever the lengths of the rows: every warp of the GPU streams as many
  units as every other, plus or minus one. A few multiprocessors stay idle where that makes the cut exact, because cuts
  then mostly fall between rows of one length, which need no merging. Each block of threads adds up the lengths on the
  device to find its cut, while the kernel before this one still runs.
* With few rows, the blocks of a cluster share a row and a key head. They send their parts to each other's shared
  memory, which is faster than through memory.
* Keys and values are read once, so the loads tell the L2 cache to drop them first.
* Parts are added in a fixed order, so the bits do not change from run to run. They do change with the batch, because
  the cuts do.

Bound by bytes: each key and value of every row is read once.

What was tried and lost is in ``docs/lab-notes/attention.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...lang import cuda
from ...lang.jit import multiprocessors
from ..packed.tiling import LOG2E
from .batch import PagedBatch

HEAD_DIMS = (64, 128)
CACHES = (torch.bfloat16, torch.float8_e4m3fn)
BLOCK_SIZE = 16
MOST_GROUP = 16
"""Query heads of a key head."""
WITH_SINKS = (64, 8)
"""The size of heads with sinks, and the most of them to a key head (gpt-oss has 8)."""
MOST_ROWS = 1024
PARTS = 1 << 20
"""Count of numbers that thread blocks may exchange: those of one item for each block."""
NOTHING = -1
"""Bits that mark a number that has not been written yet."""
SIGNATURE = "pppppppp" + "iiiiiii" + "liif" + "iiiiiii" + "pp"
"""The types of the launcher's arguments, see ``cuda.bind``."""


@dataclass(frozen=True, slots=True)
class DecodeHopperTiling:
    """Division of a batch into work items."""

    warps: int
    """Warps of a block of threads."""
    stages: int
    """Buffers of a warp, one unit each; the numbers in ``STAGES`` are compiled."""
    ranks: int = 0
    """Blocks of a cluster that share a row and a key head; 0: an even cut."""
    blocks: int = 1
    """Blocks for each multiprocessor, for an even cut."""


STAGES = {128: 2, 64: 3}
"""Compiled numbers of stages of a cache in bfloat16, by head dimension; of one in fp8 twice as many."""
WARPS = 8
"""Warps of a block: more are no quicker, and share rows of a power of two less evenly."""
AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15}
"""Number of clusters that an H200 runs at once with one block on each multiprocessor, by blocks of a cluster."""
SHORT, LONG = 1024, 4096
"""Up to SHORT positions one block keeps a row whole; up to LONG positions a cluster does."""


@cache
def choose(items: int, longest: int, d: int, fp8: bool = False) -> DecodeHopperTiling:
    """Return a tiling for ``items`` rows times key heads of up to ``longest`` positions, from times on an H200.

    A cluster takes an item where all clusters run at once: a second round would take as long again. Clusters do not
    help each other, so long rows are better cut evenly over the whole GPU.
    """
    stages = STAGES[d] * (2 if fp8 else 1)
    for ranks in (4, 2, 1) if longest <= SHORT else (8, 4, 2) if longest <= LONG else ():
        if items <= AT_ONCE[ranks]:
            return DecodeHopperTiling(WARPS, stages, ranks)
    return DecodeHopperTiling(WARPS, stages)


def refusal(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> str | None:
    """Return the reason why this kernel does not take these inputs; None if it does."""
    reason = PagedDecode.mixed_refusal(q, k_cache, v_cache, batch, window, softcap=softcap, sinks=sinks, chunk=chunk)
    return reason or (None if batch.decodes_only(len(q)) else "it attends rows of one query")


def sinks_refusal(q: Tensor, k_cache: Tensor, sinks: Tensor) -> str | None:
    """Return the reason why this kernel does not take these sinks; None if it does."""
    size, most = WITH_SINKS
    if q.shape[2] != size or q.shape[1] > most * k_cache.shape[1] or sinks.dtype != torch.bfloat16:
        return f"it takes sinks in bfloat16, of heads of {size}, up to {most} to a key head"
    return None


def mixed_refusal(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> str | None:
    """Return ``refusal`` for batches in which other rows may have several queries; the kernel skips those rows."""
    (_, heads, d), (_, kv_heads, block, _) = q.shape, k_cache.shape
    if q.dtype != torch.bfloat16 or k_cache.dtype != v_cache.dtype or k_cache.dtype not in CACHES:
        return (
            f"it computes in bfloat16, of a cache in that or in fp8, not {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        )
    if d not in HEAD_DIMS or block != BLOCK_SIZE or heads % kv_heads or heads // kv_heads > MOST_GROUP:
        return (
            f"it takes heads of {HEAD_DIMS}, up to {MOST_GROUP} to a key head, in blocks of {BLOCK_SIZE} tokens, not "
            f"{heads} and {kv_heads} heads of {d} in blocks of {block}"
        )
    if (
        k_cache.stride() != v_cache.stride()
        or k_cache.stride()[1:] != (block * d, d, 1)
        or k_cache.stride(0) % (block * d)
    ):
        return "it takes caches of one layout, a head's part of a block in one piece"
    if any(t.data_ptr() % 16 for t in (k_cache, v_cache)) or q.stride(2) != 1 or q.stride(0) % 2 or q.stride(1) % 2:
        return "its copies need caches at multiples of 16 bytes, and queries at multiples of 4"
    if batch.num_rows > MOST_ROWS:
        return f"it takes up to {MOST_ROWS} rows"
    return None


class PagedDecode:
    """``paged_attention`` of rows with one query by ``paged_decode_hopper.cu``, on one device.

    Launches share the memory for parts of sums, so those of one instance must be on one stream.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper("paged_decode_hopper", "transect_paged_decode", SIGNATURE, device)
        self._parts = torch.full((PARTS,), NOTHING, dtype=torch.int32, device=device or "cuda")

    @staticmethod
    def mixed_refusal(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        window: int | None = None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> str | None:
        """Return ``refusal`` for batches in which other rows may have several queries."""
        if softcap is not None or chunk is not None:
            return "it attends without caps on scores and chunks"
        if sinks is not None and sinks_refusal(q, k_cache, sinks) is not None:
            return sinks_refusal(q, k_cache, sinks)
        return mixed_refusal(q, k_cache, v_cache, batch)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        dependent_launch: bool = False,
        beside: bool = False,
        tiling: DecodeHopperTiling | None = None,
    ) -> Tensor:
        """Compute ``paged_attention.reference`` without reading a length on the host.

        ``out`` ``[T, H, d]``: where the results go; rows of several queries in the batch are left alone there.
        ``dependent_launch``: the kernel may read the batch, and the cache's positions before each row's last, before
        the kernel before it on the stream has ended. So that kernel must not write them (unless ``batch.fresh``).
        ``beside``: a dependent launch after this one begins when the kernel before this one has ended, not sooner.

        Raises:
            ValueError: see ``refusal``; or rows of several queries without ``out``.
            RuntimeError: the launch failed.
        """
        mixed = not batch.decodes_only(len(q))
        reason = mixed_refusal(q, k_cache, v_cache, batch)
        if mixed and out is None:
            reason = "it attends rows of one query"
        if reason is None and sinks is not None:
            reason = sinks_refusal(q, k_cache, sinks)
        if reason:
            raise ValueError(f"paged_decode_hopper.cu: {reason}")
        tokens, heads, d = q.shape
        kv_heads, rows = k_cache.shape[1], batch.num_rows
        group = heads // kv_heads
        if out is None:
            out = q.new_empty((tokens, heads, d))
        if not rows:
            return out
        units = multiprocessors(q.device)
        fp8 = k_cache.dtype == torch.float8_e4m3fn
        tiling = tiling or choose(rows * kv_heads, batch.max_seq_len, d, fp8)
        tables = batch.block_tables
        code = self._launch(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(),
            batch.query_starts.data_ptr() if mixed else 0, batch.seq_lens.data_ptr(), out.data_ptr(),
            self._parts.data_ptr(), rows, tables.shape[1], tables.stride(0), window or 0, kv_heads, group, d,
            q.stride(0), q.stride(1),
            k_cache.stride(0) // (BLOCK_SIZE * d), scale * LOG2E, tiling.blocks * units, tiling.warps, tiling.stages,
            tiling.ranks, 2 if dependent_launch and not batch.fresh else 1, int(beside), int(fp8),
            0 if sinks is None else sinks.contiguous().data_ptr(),
            torch.cuda.current_stream(q.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"paged_decode_hopper.cu: the launch of {tiling} for {rows} rows returned {code}")
        return out
