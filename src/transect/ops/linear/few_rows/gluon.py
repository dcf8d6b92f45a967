"""Product of 33 to 256 rows with a small weight on Hopper: each program asks for its weights before its input exists.

    Y = X W^T + b        or, with a gate,        Y = silu(X V^T) * (X U^T), where W is V above U

Shapes: x ``[M, K]``, weight ``[N, K]``, bias ``[N]``, result ``[M, N]`` (with a gate ``[M, N / 2]``, no bias), all
bfloat16; float32 inside. A norm may stand on either side, as in ``stream_products.py``.

Bound by bytes, but a launch in a decode step of a small model takes about 5 us, and memory works for one or two of
them. The rest is waiting: for the kernel that makes X, and then for the first weights. So every program asks for *all*
weights of its tile before it waits for that kernel. Afterwards it waits only for X, which comes from the L2 cache. The
number of a tile's columns, and of programs that share its k, follow from how many weights fit in shared memory. X goes
through buffers of its own, as many as there is room for.

Programs that share a tile's k leave their sums in memory, and the program with the last part adds them up in the order
of the parts. So every run gives the same bits. A sum is stored over a bit pattern that no sum has (a NaN that
arithmetic never makes), so the reader sees when it is there, and then puts the pattern back. There is no fence and no
counter to wait for. Each number goes to the same thread of the other program. Programs of earlier parts start earlier,
so a program always waits for one that already runs.

From 128 rows on these products need more arithmetic than waiting, and the Triton kernels are as quick or quicker. What
was tried and lost is in ``docs/lab-notes/few-row-products.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....hardware.device import target_of
from ...lang.gluon_language import (
    GLUON_MISSING,
    async_load,
    block_barrier,
    fence_async_shared,
    gl,
    gluon,
    gluon_kernel,
    mbarrier,
    tensor_descriptor,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...lang.jit import INTERPRETED, next_power_of_2, triton
from ...lang.tiles import fits_descriptor
from ...registry import Kernel
from .cuda import SHARED, Beside

PARTS = 1 << 20
"""Initial count of numbers that the programs of a launch may exchange: enough for 512 rows and 2048 columns."""


@dataclass(frozen=True, slots=True)
class GluonTiling:
    """The tiling of a product."""

    bm: int
    """Rows of X in a tile."""
    bn: int
    """Columns of Y in a tile; with a gate, as many of the other factor too."""
    bk: int
    """Number of k in one copy."""
    split: int
    """Programs that share a tile's k."""
    stages: int
    """Buffers for X."""
    warps: int = 4
    gated: bool = False

    def shared_bytes(self, k: int) -> int:
        """Return the shared memory of a program, without its barriers."""
        columns = self.bn * (2 if self.gated else 1)
        return 2 * (columns * k // self.split + min(self.stages, k // self.bk // self.split) * self.bm * self.bk)

    def refusal(self, n: int, k: int) -> str | None:
        """Return the reason why this tiling does not take n columns of Y and a sum over k; None if it does."""
        if n % self.bn or k % (self.bk * self.split):
            return f"{n} columns and {k} k must be whole tiles of {self.bn}, and whole copies of {self.bk} in each part"
        if self.gated and self.split > 1:
            return "a gate is for whole sums"
        if self.split > 1 and self.bm * self.bn % (128 * self.warps):
            return "programs that share a tile's k hand on 4 elements of each thread at a time, or a multiple"
        if self.stages < 2 or self.bm % (16 * self.warps) or self.warps % 4:
            return "it takes 2 stages or more, and 16 rows of a tile, or a multiple, for each of 4 or 8 warps"
        taken = self.shared_bytes(k) + 1024
        return None if taken <= SHARED else f"it takes {taken} bytes of shared memory, of {SHARED} that there are"


@gluon_kernel
def _tell(instruction: gl.constexpr):  # type: ignore[no-untyped-def]
    """Run a PTX instruction that has no result."""
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def _fours(count: int, first: int, threads: int) -> list[tuple[str, str]]:
    """List (four adjacent numbers of a thread, their address): adjacent threads have adjacent addresses."""
    return [
        (f"{{{', '.join(f'${first + i + j}' for j in range(4))}}}", f"[mine + {i // 4 * threads * 16}]")
        for i in range(0, count, 4)
    ]


def _own(count: int) -> str:
    """Generate PTX for the first address of this thread, from the address after ``count`` results."""
    return f".reg .u32 t; .reg .b64 mine; mov.u32 t, %tid.x; mad.wide.u32 mine, t, 16, ${count};"


def _leaving(count: int, threads: int) -> str:
    """Generate PTX that stores ``count`` numbers of each thread at a given address."""
    lines = [f"st.relaxed.gpu.global.v4.b32 {place}, {four};" for four, place in _fours(count, 2 * count, threads)]
    return " ".join(["{", _own(count), *lines, "}"])


def _taking(count: int, threads: int) -> str:
    """Generate PTX that waits until all numbers at a given address have arrived, loads them, and restores the empty
    pattern."""
    fours = _fours(count, 0, threads)
    lines = ["{", _own(count), ".reg .pred again; .reg .b32 most, nothing; mov.b32 nothing, -1;", "look:"]
    lines += [f"ld.relaxed.gpu.global.v4.b32 {four}, {place};" for four, place in fours]
    lines += ["mov.b32 most, $0;", *(f"max.u32 most, most, ${i};" for i in range(1, count))]
    lines += ["setp.eq.u32 again, most, nothing;", "@again bra look;"]
    lines += [f"st.relaxed.gpu.global.v4.b32 {place}, {{nothing, nothing, nothing, nothing}};" for _, place in fours]
    return " ".join([*lines, "}"])


def _exchange(tiling: GluonTiling) -> dict[str, Any]:
    """Return the layout in which programs that share a tile's k exchange sums: all numbers of a thread at once."""
    threads = 32 * tiling.warps
    count = tiling.bm * tiling.bn // threads
    names = [*["=&r"] * count, *["l"] * count]
    return {
        "COUNT": count,
        "LEAVING": _leaving(count, threads),
        "LEFT": ",".join([*names, *["r"] * count]),
        "TAKING": _taking(count, threads),
        "TAKEN": ",".join(names),
    }


@gluon_kernel
def early_weights(  # type: ignore[no-untyped-def]
    x, weight, bias, out, parts, residual, scale, scaled, left, squares, M, N, K, n_squares, eps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, SQUARES: gl.constexpr, WARPS: gl.constexpr,
    COUNT: gl.constexpr, LEAVING: gl.constexpr, LEFT: gl.constexpr, TAKING: gl.constexpr, TAKEN: gl.constexpr,
):  # fmt: skip
    """Compute one tile of Y, or one of SPLIT parts of it, of CHUNKS copies of BK k. Axis 0: column tiles; axis 1: row
    tiles; axis 2: parts of K. x and weight are tensor descriptors; the others as of ``few_rows/triton._rows``."""
    WIDTH: gl.constexpr = 2 * BN if GATED else BN
    BYTES: gl.constexpr = (WIDTH + BM) * BK * 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [WARPS, 1], [1, 0])
    NORMS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    _tell("griddepcontrol.launch_dependents; // $0")
    # X's descriptor, the first argument, is then there when X is.
    _tell("{.reg .b64 a; mov.b64 a, early_weights_param_0; cvta.param.u64 a, a; prefetch.tensormap [a];} // $0")
    tile_n = gl.program_id(0)
    tile_m = gl.program_id(1)
    part = gl.program_id(2)
    if GATED:
        w_tiles = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, 2, BN, BK], weight.layout)
    else:
        w_tiles = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, BN, BK], weight.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], x.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    k0 = part * (CHUNKS * BK)
    for i in range(CHUNKS):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()
    for i in range(CHUNKS):
        there = barriers.index(i)
        mbarrier.expect(there, BYTES)  # with those of X
        if GATED:
            async_load(weight, [0, tile_n * BN, k0 + i * BK], there, w_tiles.index(i))
        else:
            async_load(weight, [tile_n * BN, k0 + i * BK], there, w_tiles.index(i))
    _tell("griddepcontrol.wait; // $0")
    for i in range(STAGES):
        async_load(x, [tile_m * BM, k0 + i * BK], barriers.index(i), x_tiles.index(i))
    rows = tile_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, ROWS))
    columns = tile_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, ROWS))
    at = rows[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if residual is not None:  # asked for here, there when the product is
        before = gl.load(residual + at, inside, 0.0)
        factor = gl.load(scale + columns)
    if squares is not None:
        row = tile_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, NORMS))
        place = gl.arange(0, SQUARES, layout=gl.SliceLayout(0, NORMS))
        counts = (row < M)[:, None] & (place < n_squares)[None, :]
        square = gl.load(squares + row[:, None] * n_squares + place[None, :], counts, 0.0)
    acc = gl.full([BM, WIDTH], 0.0, gl.float32, layout=SUMS)
    for i in range(CHUNKS):
        mbarrier.wait(barriers.index(i), 0)
        w_tile = w_tiles.index(i)
        if GATED:
            w_tile = w_tile.reshape([WIDTH, BK])
        acc = warpgroup_mma(x_tiles.index(i % STAGES), w_tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        after = i - 1 + STAGES
        if (i >= 1) & (after < CHUNKS):  # the buffer that all warps have read gets its next tile
            block_barrier()
            x_tile = x_tiles.index(after % STAGES)
            async_load(x, [tile_m * BM, k0 + after * BK], barriers.index(after), x_tile)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if squares is not None:
        inverse = gl.convert_layout(gl.rsqrt(gl.sum(square, 1) / K + eps), gl.SliceLayout(1, SUMS))
        acc = acc * inverse[:, None]
    if GATED:
        gate, up = acc.reshape([BM, 2, BN]).permute((0, 2, 1)).split()
        acc = gate / (1.0 + gl.exp2(-1.4426950408889634 * gate)) * up
    done = True
    if SPLIT > 1:
        # What is not there yet shows it: no count, no fence. The part that began last adds the others' sums up.
        done = part == SPLIT - 1
        tiles = gl.num_programs(0) * gl.num_programs(1)
        place = parts + (tile_m * gl.num_programs(0) + tile_n) * (BM * BN) + gl.zeros_like(acc).to(gl.int32)
        if done:
            before_it = gl.zeros_like(acc)
            for other in gl.static_range(SPLIT - 1):
                at_other = place + other * tiles * (BM * BN)
                found = gl.inline_asm_elementwise(TAKING, TAKEN, [at_other], dtype=gl.int32, is_pure=False, pack=COUNT)
                before_it += found.to(gl.float32, bitcast=True)
            acc = before_it + acc
        else:
            left_for_it = [place + part * tiles * (BM * BN), acc.to(gl.int32, bitcast=True)]
            gl.inline_asm_elementwise(LEAVING, LEFT, left_for_it, dtype=gl.int32, is_pure=False, pack=COUNT)
    if done:
        y = gl.convert_layout(acc, ROWS)
        if bias is not None:
            y += gl.load(bias + columns).to(gl.float32)[None, :]
        if residual is not None:
            total = (y + before.to(gl.float32)).to(gl.bfloat16)
            gl.store(out + at, total, inside)
            y = total.to(gl.float32)
            gl.store(scaled + at, (y * factor.to(gl.float32)[None, :]).to(gl.bfloat16), inside)
            gl.store(left + rows * gl.num_programs(0) + tile_n, gl.sum(y * y, 1), rows < M)
        else:
            gl.store(out + at, y.to(gl.bfloat16), inside)


def _layout(*tile: int) -> Any:
    """Return the layout of such a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(tile), gl.bfloat16)


def _describe(matrix: Tensor, *tile: int) -> Any:
    return tensor_descriptor(matrix, list(tile), _layout(*tile))


class GluonRows:
    """Products by this kernel. It owns the memory in which programs leave sums for each other, so launches of one
    instance must be on one stream."""

    def __init__(self) -> None:
        self._parts: dict[torch.device, Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiling: GluonTiling) -> Tensor:
        """Compute ``small_matmul.reference``, or with ``tiling.gated`` ``gate_up.reference``.

        The weight may be read while the kernel before still runs, so that kernel must not write it.

        Raises:
            ValueError: ``refusal`` gives a reason.
        """
        return self.beside(x, weight, bias, Beside(), tiling=tiling)[0]

    def beside(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Beside, *, tiling: GluonTiling
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return a product with a norm beside it; results and errors are those of ``TritonRows.beside``."""
        reason = refusal(x, weight, bias, norm, tiling)
        if reason:
            raise ValueError(f"small_matmul_gluon: {reason}")
        (m, k), n = x.shape, weight.shape[0] // (2 if tiling.gated else 1)
        grid = (n // tiling.bn, triton.cdiv(m, tiling.bm), tiling.split)
        chunks = k // tiling.bk // tiling.split
        out = x.new_empty((m, n))
        scaled = left = parts = None
        if norm.residual is not None:
            scaled, left = x.new_empty((m, n)), x.new_empty((m, grid[0]), dtype=torch.float32)
        if tiling.split > 1:
            parts = self._nothing(x.device, (tiling.split - 1) * grid[0] * grid[1] * tiling.bm * tiling.bn)
        count = 4 if norm.squares is None else norm.squares.shape[1]
        w = _describe(weight, tiling.bn, tiling.bk)
        if tiling.gated:
            w = _describe(weight.unflatten(0, (2, n)), 2, tiling.bn, tiling.bk)
        early_weights[grid](
            _describe(x, tiling.bm, tiling.bk), w, bias, out, parts,
            norm.residual, norm.scale, scaled, left, norm.squares, m, n, k, count, norm.eps,
            BM=tiling.bm, BN=tiling.bn, BK=tiling.bk, CHUNKS=chunks, SPLIT=tiling.split,
            STAGES=min(tiling.stages, chunks), GATED=tiling.gated, SQUARES=max(64, next_power_of_2(count)),
            WARPS=tiling.warps, num_warps=tiling.warps, **_exchange(tiling), launch_pdl=True,
        )  # fmt: skip
        return out, scaled, left

    def _nothing(self, device: torch.device, count: int) -> Tensor:
        """Return a buffer of at least ``count`` numbers, all holding the empty pattern; every launch leaves it so.

        Raises:
            RuntimeError: first use on this device is inside a CUDA graph capture.
        """
        held = self._parts.get(device)
        if held is None or held.numel() < count:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("small_matmul_gluon: run the operator once before capturing it in a CUDA graph")
            held = torch.full((max(count, PARTS),), -1, dtype=torch.int32, device=device).view(torch.float32)
            self._parts[device] = held
        return held


def refusal(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Beside, tiling: GluonTiling) -> str | None:
    """Return the reason why the kernel does not take these arguments; None if it does."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not x.numel():
        return f"x {list(x.shape)} and weight {list(weight.shape)} must be [M, K] and [N, K], not empty"
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {x.dtype} and {weight.dtype}"
    if x.stride(1) != 1 or weight.stride(1) != 1 or not fits_descriptor(x, weight):
        return "x and weight must have rows whose neighbours lie side by side, on multiples of 16 bytes"
    n = weight.shape[0] // (2 if tiling.gated else 1)
    if tiling.gated and (bias is not None or norm.residual is not None):
        return "a gate is for sums without bias and residual"
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        return f"the bias must be [{n}] and contiguous"
    return tiling.refusal(n, x.shape[1]) or norm.refusal(x, n, sixteens=False) or device_refusal(x.device)


def device_refusal(device: torch.device) -> str | None:
    """Return the reason why nothing runs here on ``device``; None if it does."""
    if gluon is None:
        return f"it needs Triton's Gluon: {GLUON_MISSING}"
    if INTERPRETED:
        return "it needs Triton's compiler, and the interpreter is on"
    if device.type != "cuda" or not target_of(device).hopper:
        return f"it runs on an sm_90, and the inputs are on {device}"
    return None


def kernels() -> Sequence[Kernel]:
    """Return the kernels to compile ahead of time."""
    if gluon is None:
        return []
    pointers = {"parts": "*fp32", "left": "*fp32", "squares": "*fp32"}
    pointers |= dict.fromkeys(("bias", "out", "residual", "scale", "scaled"), "*bf16")
    numbers = {**dict.fromkeys(("M", "N", "K", "n_squares"), "i32"), "eps": "fp32"}
    made = []
    for name, k, tiling, absent in (
        ("added to a stream", 2048, GluonTiling(64, 16, 128, 2, 8), ("bias", "squares")),
        (
            "with a gate",
            1024,
            GluonTiling(64, 32, 128, 1, 4, gated=True),
            ("bias", "residual", "scale", "scaled", "left"),
        ),
    ):
        chunks = k // tiling.bk // tiling.split
        boxes = {"x": (tiling.bm, tiling.bk), "weight": (*([2] if tiling.gated else []), tiling.bn, tiling.bk)}
        tiles = {label: f"tensordesc<bf16{list(box)},{_layout(*box)!r}>" for label, box in boxes.items()}
        sizes: dict[str, Any] = {
            "BM": tiling.bm,
            "BN": tiling.bn,
            "BK": tiling.bk,
            "CHUNKS": chunks,
            "SPLIT": tiling.split,
            "WARPS": tiling.warps,
        }
        sizes |= {"STAGES": min(tiling.stages, chunks), "GATED": tiling.gated, "SQUARES": 64, **dict.fromkeys(absent)}
        sizes |= _exchange(tiling) | ({} if tiling.split > 1 else {"parts": None})
        made.append(
            Kernel(
                name=f"rows_hopper, {name}",
                function=early_weights,
                arguments={**tiles, **pointers, **numbers},
                constants=sizes,
                divisible=("N", "K", "n_squares"),
                warps=tiling.warps,
                targets=("sm_90",),
                implementation="chosen",
                options={"launch_pdl": True},
            )
        )
    return made
