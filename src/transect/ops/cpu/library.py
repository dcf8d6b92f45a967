"""The C++ kernels as Python functions on tensors. They check their arguments, because the C++ side does not."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ...hardware.host_memory import HUGE_PAGE, host_memory
from ..registry import Unavailable
from . import build

GROUP_ROWS = 16
"""Output rows that are packed together; a KV block and a head must be a multiple of it."""


class Kind(IntEnum):
    """The storage of a packed weight (see ``kinds.h``): bits of a code, then the format of scales and zeros; plain
    numbers; a block type of GGUF files."""

    Q4_HALF = 0
    Q4_FLOAT = 1
    Q8_HALF = 2
    Q8_FLOAT = 3
    Q8_FLOAT_G16 = 4
    BF16 = 5
    F32 = 6
    Q4_0 = 7
    Q5_0 = 8
    Q5_1 = 9
    Q8_0 = 10
    Q4_K = 11
    Q5_K = 12
    Q6_K = 13
    FP8 = 14


class CPacked(Structure):
    """``Packed`` of ``packed.h``."""

    _fields_ = (("kind", c_int32), ("n", c_int32), ("k", c_int32), ("data", c_void_p), ("bias", c_void_p))


KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
"""Dtypes that keys and values may be cached in, by the numbers of ``attention.h``."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight matrix [n, k] in the layout of ``kinds.h``; ``data`` is uint8 and may be memory-mapped.

    ``bias`` is float32 [n] or None. The tensors are kept alive here; the C++ side holds their addresses.
    """

    kind: Kind
    n: int
    k: int
    data: Tensor
    bias: Tensor | None = None

    def c_struct(self) -> CPacked:
        bias = None if self.bias is None else self.bias.data_ptr()
        return CPacked(int(self.kind), self.n, self.k, self.data.data_ptr(), bias)


class Library:
    """A loaded kernel library and its team of threads.

    Args:
        threads: size of the team, the calling thread included.
        march: see ``build.library_path``.
        bfloat16: products round their inputs to it, with sums in float32. A processor without AVX512-BF16 computes in
            float32 all the same.

    Raises:
        Unavailable: the library cannot be built or loaded here.
        ValueError: ``threads`` is not positive.
    """

    def __init__(self, threads: int, march: str = "native", *, bfloat16: bool = False) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        path = build.library_path(march)
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"the C++ kernels could not be loaded: {error}") from None
        self._declare()
        self.bfloat16 = bfloat16 and bool(self._c.transect_bfloat16())
        """True if products round their inputs. Matrices of float32 are multiplied in float32 still."""
        self.name = f"{path.stem}-bfloat16" if self.bfloat16 else path.stem
        """Changes with the sources, the compiler, the processor and the arithmetic."""
        self.threads = threads
        self.isa: str = self._c.transect_isa().decode()
        self._pool = self._c.transect_pool_new(threads)
        weakref.finalize(self, self._c.transect_pool_free, self._pool)

    def _declare(self) -> None:
        c = self._c
        packed = POINTER(CPacked)
        batch = [c_int, c_void_p, c_void_p, c_void_p, c_int64]  # rows, query starts, lengths, block tables, stride
        attention = [c_void_p, c_int, *[c_void_p] * 2, *[c_int] * 4, *[c_void_p] * 2, *batch, c_float, c_int]
        run = [*[c_void_p] * 2, c_int, c_void_p, *batch, *[c_void_p] * 4, c_int64, *[c_void_p] * 2]
        run += [c_int, *[c_void_p] * 2, c_int]
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "isa": (c_char_p, []),
            "bfloat16": (c_int, []),
            "pool_new": (c_void_p, [c_int]),
            "pool_free": (None, [c_void_p]),
            "packed_bytes": (c_int64, [c_int, c_int, c_int]),
            "pack_affine": (None, [c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p]),
            "pack_blocks": (None, [c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p]),
            "pack_dense": (None, [c_int, c_int, c_int, c_void_p, c_void_p]),
            "linear": (None, [c_void_p, packed, c_void_p, c_int, c_void_p, c_int]),
            "rows": (None, [packed, c_void_p, c_int, c_void_p]),
            "paged_attention": (None, attention),
            "fma_probe": (c_double, [c_void_p, c_int64]),
            "stack_new": (c_void_p, [c_void_p] * 3),
            "stack_free": (None, [c_void_p]),
            "stack_run": (None, run),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(c, "transect_" + name)
            function.restype, function.argtypes = result, arguments

    def panel(self, kind: Kind) -> int:
        """Return the number of adjacent columns of a weight of this kind that are never split."""
        return next(k for k in (1, 2, 4, 8, 16, 32, 256) if self._c.transect_packed_bytes(kind, GROUP_ROWS, k))

    def pack_affine(self, kind: Kind, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Pack ``weight = scale * code + zero``: codes uint8 [n, k]; scale, zero float32 [n, k / group] -> uint8. In
        ``FP8`` codes are the bits of e4m3, and ``zero`` is not read."""
        n, k = codes.shape
        out = _room(self._c.transect_packed_bytes(kind, n, k))
        kept = codes.contiguous(), scale.contiguous(), zero.contiguous(), out
        self._c.transect_pack_affine(kind, n, k, *(each.data_ptr() for each in kept))
        return out

    def pack_blocks(self, kind: Kind, codes: Tensor, halves: Tensor, steps: Tensor | None) -> Tensor:
        """Pack a block type of GGUF files: codes uint8 [n, k]; float16 scales (and minima), uint8 [n, panels, 2 or 4];
        whole-number steps, uint8 [n, panels, groups, 1 or 2] or None -> uint8."""
        n, k = codes.shape
        out = _room(self._c.transect_packed_bytes(kind, n, k))
        codes, halves, steps = codes.contiguous(), halves.contiguous(), None if steps is None else steps.contiguous()
        pointers = (codes.data_ptr(), halves.data_ptr(), 0 if steps is None else steps.data_ptr(), out.data_ptr())
        self._c.transect_pack_blocks(kind, n, k, *pointers)
        return out

    def pack_dense(self, weight: Tensor) -> tuple[Kind, Tensor]:
        """Pack a bf16 (even k) or float32 matrix [n, k] -> (kind, uint8 data). Other types become float32."""
        n, k = weight.shape
        if weight.dtype != torch.bfloat16 or k % 2:
            weight = weight.to(torch.float32)
        kind = Kind.BF16 if weight.dtype == torch.bfloat16 else Kind.F32
        weight = weight.contiguous()
        out = _room(self._c.transect_packed_bytes(kind, n, k))
        self._c.transect_pack_dense(kind, n, k, weight.data_ptr(), out.data_ptr())
        return kind, out

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Compute x [rows, k] -> x W^T + bias, float32 [rows, n]. A row's result does not depend on the other rows."""
        if x.dim() != 2 or x.shape[1] != weight.k:
            raise ValueError(f"x must be [rows, {weight.k}], got {tuple(x.shape)}")
        x = x.to(torch.float32).contiguous()
        y = torch.empty(x.shape[0], weight.n, dtype=torch.float32)
        if x.shape[0]:
            c_weight = byref(weight.c_struct())
            self._c.transect_linear(self._pool, c_weight, x.data_ptr(), x.shape[0], y.data_ptr(), self.bfloat16)
        return y

    def rows(self, weight: PackedWeight, index: Tensor) -> Tensor:
        """Return the rows of W with numbers ``index`` int64 [count] -> float32 [count, k]: an embedding look-up."""
        index = index.contiguous()
        lowest, highest = (int(end) for end in index.aminmax()) if index.numel() else (0, 0)
        if lowest < 0 or highest >= weight.n:
            raise ValueError(f"row numbers must be in 0..{weight.n - 1}, got {lowest}..{highest}")
        out = torch.empty(index.numel(), weight.k, dtype=torch.float32)
        self._c.transect_rows(byref(weight.c_struct()), index.data_ptr(), index.numel(), out.data_ptr())
        return out

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend with q [T, heads, D] to one layer's caches [blocks, kv_heads, block_size, D] -> float32 [T, heads, D].

        ``k_cache`` must be stored with positions innermost, as ``empty_cache`` makes it; both of one of ``KV_DTYPES``.
        """
        check_cache(k_cache, v_cache)
        _, kv_heads, block_size, head_dim = v_cache.shape
        q = q.to(torch.float32).contiguous()
        out = torch.empty_like(q)
        batch = batch_arguments(block_tables, query_starts, seq_lens)
        of_q = q.data_ptr(), out.data_ptr(), q.shape[1], kv_heads, head_dim, block_size
        cache, kv = (k_cache.data_ptr(), v_cache.data_ptr()), KV_DTYPES[v_cache.dtype]
        self._c.transect_paged_attention(self._pool, kv, *of_q, *cache, *batch, scale, window or 0)
        return out

    def fma_probe(self, rounds: int) -> float:
        """Run multiply-adds on registers alone, on every thread, and return the number of float operations (the caller
        times)."""
        return self._c.transect_fma_probe(self._pool, rounds)


def _room(nbytes: int) -> Tensor:
    """Allocate a packed matrix, a large one in huge pages, whose addresses are looked up more quickly."""
    return host_memory(nbytes) if nbytes >= 8 * HUGE_PAGE else torch.empty(nbytes, dtype=torch.uint8)


def empty_cache(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate K and V caches of ``shape`` [..., block_size, head_dim], K stored with positions innermost. They are not
    filled, so memory is used only as blocks are written.

    Raises:
        ValueError: block size or head size is not a multiple of 16, or the dtype is none of ``KV_DTYPES``.
    """
    *outer, block_size, head_dim = shape
    if block_size % GROUP_ROWS or head_dim % GROUP_ROWS:
        raise ValueError(
            f"the C++ kernels need a block size and a head size that are multiples of {GROUP_ROWS}, got {block_size} "
            f"and {head_dim}; use block_size=16, or native=False to run on torch alone"
        )
    if dtype not in KV_DTYPES:
        raise ValueError(f"the C++ kernels keep K and V as bfloat16, float32 or fp8, not {dtype}")
    k = torch.empty(*outer, head_dim, block_size, dtype=dtype).transpose(-1, -2)
    return k, torch.empty(*outer, block_size, head_dim, dtype=dtype)


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse caches that ``empty_cache`` has not made, with a ValueError."""
    if not v_cache.is_contiguous() or not k_cache.transpose(-1, -2).is_contiguous():
        raise ValueError("the KV cache must be as `empty_cache` makes it: V contiguous, K with positions innermost")


def batch_arguments(block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor) -> tuple[int, int, int, int, int]:
    """Check the tensors of a ragged batch, and return it as arguments of the C functions."""
    for name, tensor in (("block_tables", block_tables), ("query_starts", query_starts), ("seq_lens", seq_lens)):
        if tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
            raise ValueError(f"{name} must be int32 with its last dimension contiguous")
    rows = seq_lens.shape[0]
    return rows, query_starts.data_ptr(), seq_lens.data_ptr(), block_tables.data_ptr(), block_tables.stride(0)


@functools.lru_cache(maxsize=8)
def load(threads: int, march: str = "native", *, bfloat16: bool = False) -> Library:
    """Return the library with a team of ``threads``; loaded and started once for each size and arithmetic."""
    return Library(threads, march, bfloat16=bfloat16)
