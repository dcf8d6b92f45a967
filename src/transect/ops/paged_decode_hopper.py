r"""Attention of decode rows over a paged cache on Hopper GPUs, in CUDA C++ (``paged_decode_hopper.cu``).

The math and the arguments are those of ``paged_attention.py``; this is its case of one query a row. With G query heads
to a key head that is 4 G d FLOPs for 4 d bytes of bfloat16, far below what the tensor cores do meanwhile: all there is
to do is to keep memory busy until the last byte.

* The unit of work is a block of the cache for one key head, two contiguous pieces of memory. The units of all rows and
  heads stand in one line that is cut evenly, whatever the rows' lengths: every warp of the GPU streams as many as every
  other, give or take one. Where the cuts fall follows from the lengths on the device, which each block of threads adds
  up for itself, while the kernel before this one still runs.
* At few rows the blocks of a cluster share a row and a key head: they put their parts together over each other's shared
  memory, sooner than through memory.
* Parts are added in a fixed order, so the bits do not change from run to run. They do change with the batch, because
  the cuts do.

With ``Turn`` the kernel also does what ``rotary_kv_write.py`` does for such rows, on the way: a launch less.

Bound by: bytes, each key and value of every row once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import cuda
from .attention_tiles import LOG2E
from .jit import multiprocessors
from .paged_batch import PagedBatch
from .registry import Unavailable

HEAD_DIMS = (64, 128)
BLOCK_SIZE = 16
MOST_GROUP = 16
"""Query heads of a key head."""
MOST_ROWS = 1024
PARTS = 1 << 20
"""Numbers that blocks of threads may leave for each other: those of one item for each."""
NOTHING = -1
"""The bits of a number that nobody has left."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is cut up."""

    warps: int
    """Of a block of threads."""
    ranks: int = 0
    """Blocks of a cluster that share a row and a key head; 0: an even cut."""
    blocks: int = 1
    """For each multiprocessor, of an even cut."""


STAGES = 3
"""Buffers of a warp, a unit each."""
FEW_ITEMS, LONG = 32, 4096
"""Rows times key heads that clusters take, and positions up to which they do."""


def most_warps(d: int, group: int) -> int:
    """Warps of a block of threads whose buffers and parts of sums fit into shared memory."""
    return 12 if d == 64 else 8 if group <= 4 else 7 if group <= 8 else 6


def choose(items: int, longest: int, d: int, group: int) -> Plan:
    """A plan for ``items`` rows times key heads of up to ``longest`` positions, by times on an H200.

    Few items are shared out to as many blocks as there are multiprocessors for. Clusters do not help each other, so
    long rows are better cut evenly over the whole GPU.
    """
    warps = most_warps(d, group)
    if items > FEW_ITEMS or longest > LONG:
        return Plan(warps)
    return Plan(min(warps, 4 if longest <= 1024 else 8), ranks=8 if items <= FEW_ITEMS // 2 else 4)


def refuses(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> str:
    """Why this kernel does not take these inputs, or an empty string."""
    if not batch.decodes_only(len(q)):
        return "it attends rows of one query"
    return takes_not(q, k_cache, v_cache, batch)


def takes_not(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> str:
    """As ``refuses``, for batches in which other rows may have several queries: those it leaves alone."""
    (_, heads, d), (_, kv_heads, block, _) = q.shape, k_cache.shape
    if not q.dtype == k_cache.dtype == v_cache.dtype == torch.bfloat16:
        return f"it computes in bfloat16, not {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
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
    return ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What ``PagedDecode`` needs to do the work of ``rotary_kv_write``: keys and values ``[T, K, d]`` as the projection
    left them, cos and sin ``[T, d / 2]`` float32, weights ``[d]`` of the norm of queries' and keys' heads, or neither.
    """

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6


class PagedDecode:
    """``paged_attention`` of rows with one query by ``paged_decode_hopper.cu``, on one device.

    Launches share the memory for parts of sums, so those of one instance must be on one stream.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        if not torch.cuda.is_available() or torch.version.hip is not None:
            raise Unavailable("paged_decode_hopper.cu needs an NVIDIA GPU (sm_90)")
        if torch.cuda.get_device_capability(device) != (9, 0):
            raise Unavailable("paged_decode_hopper.cu is for sm_90 only")
        self._launch = cuda.bind(
            "paged_decode_hopper", "transect_paged_decode",
            "pppppppp" + "iiiiiii" + "liif" + "ppllii" + "ppii" + "ppf" + "iiiii" + "p",
        )  # fmt: skip
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("paged_attention: run the operator once before capturing it in a CUDA graph")
        self._parts = torch.full((PARTS,), NOTHING, dtype=torch.int32, device=device or "cuda")

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        *,
        turn: Turn | None = None,
        out: Tensor | None = None,
        pdl: bool = False,
        plan: Plan | None = None,
    ) -> Tensor:
        """As ``paged_attention.reference``; reads no length on the host.

        ``turn``: q, and the keys and values of the step, are as the projection left them; both caches are written too.
        ``out`` ``[T, H, d]``: there the results go, and where the batch holds rows of several queries those are left
        alone. ``pdl``: the batch, and what the cache holds of positions before each row's last, may be read before the
        kernel before this one on the stream has ended, so that one must not write them (unless ``batch.fresh``).

        Raises:
            ValueError: see ``refuses``; or rows of several queries without ``out`` or with ``turn``.
            RuntimeError: the launch failed.
        """
        mixed = not batch.decodes_only(len(q))
        reason = takes_not(q, k_cache, v_cache, batch)
        if mixed and (out is None or turn is not None):
            reason = "it attends rows of one query"
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
        cut = plan or choose(rows * kv_heads, batch.max_seq_len, d, group)
        new: tuple[float, ...] = (0,) * 13
        if turn is not None:
            new = (
                turn.k.data_ptr(), turn.v.data_ptr(), turn.k.stride(0), turn.v.stride(0), turn.k.stride(1),
                turn.v.stride(1), turn.cos.data_ptr(), turn.sin.data_ptr(), turn.cos.stride(0), turn.sin.stride(0),
                0 if turn.q_weight is None else turn.q_weight.data_ptr(),
                0 if turn.k_weight is None else turn.k_weight.data_ptr(), turn.eps,
            )  # fmt: skip
        tables = batch.block_tables
        code = self._launch(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(),
            batch.query_starts.data_ptr() if mixed else 0, batch.seq_lens.data_ptr(), out.data_ptr(),
            self._parts.data_ptr(), rows, tables.shape[1], tables.stride(0), window or 0, kv_heads, group, d,
            q.stride(0), q.stride(1),
            k_cache.stride(0) // (BLOCK_SIZE * d), scale * LOG2E, *new, cut.blocks * units, cut.warps, STAGES,
            cut.ranks, 2 if pdl and not batch.fresh else 1, torch.cuda.current_stream(q.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"paged_decode_hopper.cu: the launch of {cut} for {rows} rows returned {code}")
        return out
