"""The device code of ``softmax.py``: whole rows, long rows in parts, long rows read twice; forward and backward.

Waiting cannot lock up: programs start in the order of their numbers, the parts of a row are numbered one after another,
and a row is split into no more parts than there are multiprocessors. So of the programs that wait, those of the lowest
row not yet done have all their partners running or about to run.

A long row that one program reads twice is read backwards the second time; so what was read last, and is still in the
L2 cache, comes first. The first pass keeps a maximum and a sum *per lane* of 8 neighbours: one exponential an element,
and one for each lane to rescale its sum. Exponentials run at an eighth of the rate of additions, so they are worth
counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...hardware.targets import NVIDIA_TARGETS
from ..lang.jit import kernel, tl
from ..registry import Kernel


@kernel
def _exp(x, EXACT: tl.constexpr):
    """Compute exp(x) for x <= 0. EXACT, for float32, also corrects the rounding of ``x * log2(e)``."""
    power = x * 1.4426950408889634
    e = tl.exp2(power)
    if EXACT:
        lost = tl.fma(x, 1.4426950408889634, -power) + x * 1.92596299e-8  # log2(e) is 1.925963e-8 above its float32
        e += tl.where(x > -100.0, e * (lost * 0.6931471805599453), 0.0)
    return e


@kernel
def _over(e, total, EXACT: tl.constexpr):
    """Divide e by total; EXACT rounds once."""
    if EXACT:
        y = tl.div_rn(e, total)
    else:
        y = e * (1.0 / total)
    return y


@kernel
def _total(x, EXACT: tl.constexpr):
    """Sum a part of a row; EXACT in two steps: shorter sums, smaller errors."""
    if EXACT:
        total = tl.sum(tl.sum(tl.reshape(x, (x.shape[0] // 8, 8)), 1), 0)
    else:
        total = tl.sum(x, 0)
    return total


@kernel
def rows_kernel(x_ptr, y_ptr, n_rows, n_cols, x_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ROWS whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=-float("inf")).to(tl.float32)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    e = _exp(x - tl.max(x, 1)[:, None], EXACT)
    y = _over(e, tl.sum(e, 1)[:, None], EXACT)
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def long_kernel(x_ptr, y_ptr, n_cols, x_stride, y_stride, BLOCK: tl.constexpr):
    """Compute one long row a program: one pass for maximum and sum, and one, backwards, for the result."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    lane = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    top = tl.full([BLOCK // 8], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK // 8], tl.float32)
    blocks = tl.cdiv(n_cols, BLOCK)
    for block in range(blocks):
        col = block * BLOCK + lane
        x = tl.load(x_ptr + col, mask=col < n_cols, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has seen nothing yet
        e = _exp(x - base[:, None], EXACT)
        total = total * _exp(top - base, EXACT) + tl.sum(e, 1)
        top = higher
    peak = tl.max(top, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    whole = tl.sum(total * _exp(top - base, EXACT), 0)
    for block in range(blocks):
        col = (blocks - 1 - block) * BLOCK + lane
        x = tl.load(x_ptr + col, mask=col < n_cols, other=-float("inf")).to(tl.float32)
        y = _over(_exp(x - base, EXACT), whole, EXACT)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < n_cols)


_WAIT = """{
    .reg .pred empty;
wait:
    ld.relaxed.gpu.global.b64 $0, [$1];
    setp.eq.b64 empty, $0, 0;
    @empty bra wait;
}"""
WAIT = tl.constexpr(_WAIT) if tl is not None else _WAIT
"""PTX: read a 64-bit word until it is not 0."""


@kernel
def _again(x):
    """Return x, hidden from the compiler: it then converts 16-bit numbers a second time instead of keeping them as
    float32, in twice the registers."""
    if x.dtype == tl.float32:
        same = x
    else:
        same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return same


@kernel
def clear_kernel(words_ptr, n, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Mark that no part has left its word. With DEPENDENT_LAUNCH the kernel that uses the words may begin now: it waits
    before it does."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + index, tl.zeros([BLOCK], tl.int64), mask=index < n)


@kernel
def _shared_words(words_ptr, part, word, PARTS: tl.constexpr, HELD: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Leave this part's word, which must not be 0; return those of all PARTS parts of the row, in HELD lanes."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    tl.atomic_xchg(words_ptr + part, word, sem="relaxed")
    index = tl.arange(0, HELD)
    place = (words_ptr + tl.where(index < PARTS, index, part)).to(tl.int64)
    return tl.inline_asm_elementwise(WAIT, "=l,l", [place], dtype=tl.int64, is_pure=False, pack=1)


@kernel
def split_kernel(
    x_ptr, y_ptr, words_ptr, n_cols, x_stride, y_stride,
    PARTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK elements of a row a program, held in registers while the programs combine the row's maximum and
    sum. No data is read or written twice, so the caches are told to evict it first."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    col = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < n_cols, other=-float("inf"), eviction_policy="evict_first")
    top = tl.max(x.to(tl.float32), 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = _total(_exp(_again(x).to(tl.float32) - base, EXACT), EXACT)
    # the sum is at least 1 unless top is -inf, so the word is not 0
    low = total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (top.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low
    words = _shared_words(words_ptr + row * PARTS, part, word, PARTS, HELD, DEPENDENT_LAUNCH)
    tops = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    totals = words.to(tl.int32).to(tl.float32, bitcast=True)
    peak = tl.max(tops, 0)
    totals *= _exp(tops - peak, EXACT)
    whole = tl.sum(tl.where(tl.arange(0, HELD) < PARTS, totals, 0.0), 0)
    y = _over(_exp(_again(x).to(tl.float32) - peak, EXACT), whole, EXACT)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * y_stride + col, y, mask=col < n_cols, cache_modifier=".cs")


@kernel
def split_backward_kernel(
    g_ptr, y_ptr, dx_ptr, words_ptr, n_cols, g_stride, y_stride,
    PARTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute the backward pass of ``split_kernel``; here the programs share the sum of g times y."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    col = part * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + row * g_stride + col, mask=col < n_cols, other=0.0, eviction_policy="evict_first")
    y = tl.load(y_ptr + row * y_stride + col, mask=col < n_cols, other=0.0, eviction_policy="evict_first")
    share = _total(g.to(tl.float32) * y.to(tl.float32), y_ptr.dtype.element_ty == tl.float32)
    word = (share.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)
    words = _shared_words(words_ptr + row * PARTS, part, word, PARTS, HELD, DEPENDENT_LAUNCH)
    dots = words.to(tl.int32).to(tl.float32, bitcast=True)
    dot = tl.sum(tl.where(tl.arange(0, HELD) < PARTS, dots, 0.0), 0)
    dx = _again(y).to(tl.float32) * (_again(g).to(tl.float32) - dot)
    dx = dx.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + row * n_cols.to(tl.int64) + col, dx, mask=col < n_cols, cache_modifier=".cs")


@kernel
def rows_backward_kernel(
    g_ptr, y_ptr, dx_ptr, n_rows, n_cols, g_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the backward pass of ``rows_kernel``. In float32 the product of g and y is divided by the sum of y, which
    rounding makes differ from 1."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    g = tl.load(g_ptr + row * g_stride + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + col, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(g * y, 1)
    if y_ptr.dtype.element_ty == tl.float32:
        dot = tl.div_rn(dot, tl.sum(y, 1))
    dx = y * (g - dot[:, None])
    tl.store(dx_ptr + row * n_cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@kernel
def long_backward_kernel(g_ptr, y_ptr, dx_ptr, n_cols, g_stride, y_stride, BLOCK: tl.constexpr):
    """Compute the backward pass of ``long_kernel``: one pass for the product of g and y, and one, backwards, for the
    result."""
    row = tl.program_id(0).to(tl.int64)
    g_ptr += row * g_stride
    y_ptr += row * y_stride
    dx_ptr += row * n_cols
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    blocks = tl.cdiv(n_cols, BLOCK)
    for block in range(blocks):
        col = block * BLOCK + lane
        g = tl.load(g_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        total += g * tl.load(y_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    dot = tl.sum(total, 0)
    for block in range(blocks):
        col = (blocks - 1 - block) * BLOCK + lane
        g = tl.load(g_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        tl.store(dx_ptr + col, (y * (g - dot)).to(dx_ptr.dtype.element_ty), mask=col < n_cols)


def kernels() -> Sequence[Kernel]:
    row = {"n_rows": "i32", "n_cols": "i32"}
    forward = {"x_ptr": "*bf16", "y_ptr": "*bf16"}
    backward = {"g_ptr": "*bf16", "y_ptr": "*bf16", "dx_ptr": "*bf16"}
    strides, back_strides = {"x_stride": "i32", "y_stride": "i32"}, {"g_stride": "i32", "y_stride": "i32"}
    long, words = {"n_cols": "i32"}, {"words_ptr": "*i64", "n_cols": "i32"}
    sizes = ("n_cols", "x_stride", "y_stride", "g_stride")
    tile, part = {"ROWS": 1, "BLOCK": 4096}, {"PARTS": 16, "HELD": 16, "BLOCK": 8192, "DEPENDENT_LAUNCH": False}

    def split(name: str, function: Any, arguments: dict[str, str]) -> Kernel:
        return Kernel(f"{name}, long rows split", function, arguments, part, sizes, warps=4, targets=NVIDIA_TARGETS)

    def twice(name: str, function: Any, arguments: dict[str, str]) -> Kernel:
        return Kernel(f"{name}, long rows read twice", function, arguments, {"BLOCK": 8192}, sizes, warps=8)

    return [
        Kernel(
            "no part's word is there",
            clear_kernel,
            {"words_ptr": "*i64", "n": "i32"},
            {"BLOCK": 1024, "DEPENDENT_LAUNCH": False},
        ),
        Kernel("forward, 4096 wide", rows_kernel, {**forward, **row, **strides}, tile, sizes, warps=8),
        split("forward", split_kernel, {**forward, **words, **strides}),
        twice("forward", long_kernel, {**forward, **long, **strides}),
        Kernel("backward, 4096 wide", rows_backward_kernel, {**backward, **row, **back_strides}, tile, sizes, warps=8),
        split("backward", split_backward_kernel, {**backward, **words, **back_strides}),
        twice("backward", long_backward_kernel, {**backward, **long, **back_strides}),
    ]
