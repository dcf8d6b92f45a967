r"""Softmax over the last dimension.

    m = max(x)        y_i = exp(x_i - m) / sum_j exp(x_j - m)

Backward, with g = dL/dy:

    dL/dx_i = y_i * (g_i - sum_j g_j y_j)

Shapes: x and the result ``[..., D]``. float32 inside for half inputs, rounded once at the end. A row that is -inf
throughout has no answer and gives NaN, as in torch.
Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (the running maximum).

Bound by bytes: about 5 FLOPs an element against one read and one write, 5 / (2 * 2) FLOPs per byte in bfloat16, if
the row is read once. A row of up to 32768 elements stays in the registers of one program. A longer one, such as the
scores over a vocabulary, is 256 KB and more: too long for one multiprocessor that is to have other rows on their way at
the same time. On NVIDIA GPUs several programs hold a part each, leave the maximum and sum of their part in memory, and
wait until those of the other parts of the row are there. So the row still is read once.

Waiting cannot lock up: programs start in the order of their numbers, the parts of a row are numbered one after another,
and a row is split into no more parts than there are multiprocessors. So of the programs that wait, those of the lowest
row not yet done have all their partners running or about to run.

Elsewhere (AMD, the interpreter) one program reads a long row twice, the second time backwards; so what was read last,
and is still in the L2 cache, comes first. The first pass keeps a maximum and a sum *per lane* of 8 neighbours: one
exponential an element, and one for each lane to rescale its sum. Exponentials run at an eighth of the rate of
additions, so they are worth counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import shapes
from .jit import (
    TRITON_TARGETS,
    available,
    dependent_launch,
    kernel,
    multiprocessors,
    next_power_of_2,
    require,
    rows_of,
    runs_triton,
    tl,
)
from .numerics import compute_dtype, sample
from .peers import compiled
from .registry import Case, Cost, Implementation, Kernel, Knobs, Op, register
from .tuning import Config, choose

ONE_PASS = 32768
"""The longest row that stays in registers."""


def reference(x: Tensor) -> Tensor:
    """x ``[..., D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    e = (wide - wide.amax(-1, keepdim=True).detach()).exp() if wide.numel() else wide.exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def reference_backward(grad: Tensor, y: Tensor) -> Tensor:
    """dL/dx from dL/dy and the result y, both ``[..., D]``."""
    wide = compute_dtype(y.dtype)
    g, p = grad.to(wide), y.to(wide)
    return (p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)


@kernel
def _exp(x, EXACT: tl.constexpr):
    """exp(x) for x <= 0. EXACT, for float32, also mends what rounding ``x * log2(e)`` loses."""
    power = x * 1.4426950408889634
    e = tl.exp2(power)
    if EXACT:
        lost = tl.fma(x, 1.4426950408889634, -power) + x * 1.92596299e-8  # log2(e) is 1.925963e-8 above its float32
        e += tl.where(x > -100.0, e * (lost * 0.6931471805599453), 0.0)
    return e


@kernel
def _over(e, total, EXACT: tl.constexpr):
    """e / total; EXACT rounds once."""
    if EXACT:
        y = tl.div_rn(e, total)
    else:
        y = e * (1.0 / total)
    return y


@kernel
def _total(x, EXACT: tl.constexpr):
    """The sum of a part of a row; EXACT in two steps: shorter sums, smaller errors."""
    if EXACT:
        total = tl.sum(tl.sum(tl.reshape(x, (x.shape[0] // 8, 8)), 1), 0)
    else:
        total = tl.sum(x, 0)
    return total


@kernel
def _rows_kernel(x_ptr, y_ptr, n_rows, n_cols, x_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=-float("inf")).to(tl.float32)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    e = _exp(x - tl.max(x, 1)[:, None], EXACT)
    y = _over(e, tl.sum(e, 1)[:, None], EXACT)
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _long_kernel(x_ptr, y_ptr, n_cols, x_stride, y_stride, BLOCK: tl.constexpr):
    """One long row a program: a pass for maximum and sum, and one, backwards, for the result."""
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
    """x, but the compiler does not know it: it then converts 16-bit numbers once more instead of keeping them as
    float32, in twice the registers."""
    if x.dtype == tl.float32:
        same = x
    else:
        same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return same


@kernel
def _clear_kernel(words_ptr, n, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """No part has left its word. With EARLY the kernel that uses the words may begin now: it waits before it does."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + index, tl.zeros([BLOCK], tl.int64), mask=index < n)


@kernel
def _shared_words(words_ptr, part, word, PARTS: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr):
    """Leave this part's word, which must not be 0; return those of all PARTS parts of the row, in HELD lanes."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tl.atomic_xchg(words_ptr + part, word, sem="relaxed")
    index = tl.arange(0, HELD)
    place = (words_ptr + tl.where(index < PARTS, index, part)).to(tl.int64)
    return tl.inline_asm_elementwise(WAIT, "=l,l", [place], dtype=tl.int64, is_pure=False, pack=1)


@kernel
def _split_kernel(
    x_ptr, y_ptr, words_ptr, n_cols, x_stride, y_stride,
    PARTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of a row a program, held in registers while the row's maximum and sum come together. Nothing is
    read or written again, so the caches are told to drop it first."""
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
    words = _shared_words(words_ptr + row * PARTS, part, word, PARTS, HELD, EARLY)
    tops = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    totals = words.to(tl.int32).to(tl.float32, bitcast=True)
    peak = tl.max(tops, 0)
    totals *= _exp(tops - peak, EXACT)
    whole = tl.sum(tl.where(tl.arange(0, HELD) < PARTS, totals, 0.0), 0)
    y = _over(_exp(_again(x).to(tl.float32) - peak, EXACT), whole, EXACT)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * y_stride + col, y, mask=col < n_cols, cache_modifier=".cs")


@kernel
def _split_backward_kernel(
    g_ptr, y_ptr, dx_ptr, words_ptr, n_cols, g_stride, y_stride,
    PARTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As ``_split_kernel``; what comes together is the product of g and y."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    col = part * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + row * g_stride + col, mask=col < n_cols, other=0.0, eviction_policy="evict_first")
    y = tl.load(y_ptr + row * y_stride + col, mask=col < n_cols, other=0.0, eviction_policy="evict_first")
    share = _total(g.to(tl.float32) * y.to(tl.float32), y_ptr.dtype.element_ty == tl.float32)
    word = (share.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)
    words = _shared_words(words_ptr + row * PARTS, part, word, PARTS, HELD, EARLY)
    dots = words.to(tl.int32).to(tl.float32, bitcast=True)
    dot = tl.sum(tl.where(tl.arange(0, HELD) < PARTS, dots, 0.0), 0)
    dx = _again(y).to(tl.float32) * (_again(g).to(tl.float32) - dot)
    dx = dx.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + row * n_cols.to(tl.int64) + col, dx, mask=col < n_cols, cache_modifier=".cs")


@kernel
def _rows_backward_kernel(
    g_ptr, y_ptr, dx_ptr, n_rows, n_cols, g_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
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
def _long_backward_kernel(g_ptr, y_ptr, dx_ptr, n_cols, g_stride, y_stride, BLOCK: tl.constexpr):
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


def rule(width: int) -> Config:
    """By the row's width alone, so that a row's result does not depend on how many rows there are.

    ``block`` is of 16-bit numbers; a program holds half as many of float32. ``registers`` a thread at most: with fewer
    a multiprocessor holds more of them, with too few they spill.
    """
    if width > ONE_PASS:
        return {"block": 16384, "warps": 4, "registers": 112}
    block = next_power_of_2(width)
    rows = max(1, 2048 // block)
    return {"rows": rows, "warps": min(16, max(1, rows * block // 512))}


def backward_rule(width: int) -> Config:
    """As ``rule``; two tensors are held."""
    return {"block": 4096, "warps": 2, "registers": 96} if width > ONE_PASS else rule(width)


TWICE: Config = {"block": 8192, "warps": 16}
"""How long rows are read twice."""


def _parts(x: Tensor, block: int) -> int:
    """Into how many parts the long rows of x are split; 1: not at all."""
    if not x.is_cuda or torch.version.hip:
        return 1
    parts = -(-x.shape[-1] // block)
    return parts if parts <= multiprocessors(x.device) else 1


def _cleared_words(rows: int, parts: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """A word for every part of every row, on their way to 0, and the options of the kernel that uses them next."""
    words = torch.empty(rows * parts, device=device, dtype=torch.int64)
    early = dependent_launch(device)
    _clear_kernel[(-(-words.numel() // 1024),)](words, words.numel(), BLOCK=1024, EARLY=early, num_warps=4)
    options: dict[str, Any] = {"PARTS": parts, "HELD": next_power_of_2(parts), "EARLY": early}
    return words, options | ({"launch_pdl": True} if early else {})


def triton_softmax(x: Tensor, *, config: Config | None = None) -> Tensor:
    """``reference`` in Triton. Any strides; a copy is made only if neighbours of a row are apart."""
    require("softmax", x)
    flat = rows_of(x)
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    rows, width = flat.shape
    if not flat.numel():
        return y
    knobs = config or choose("softmax", width, x.device, rule)
    if width <= ONE_PASS:
        grid = (-(-rows // knobs["rows"]),)
        block = next_power_of_2(width)
        _rows_kernel[grid](
            flat, y, rows, width, flat.stride(0), width, ROWS=knobs["rows"], BLOCK=block, num_warps=knobs["warps"]
        )
        return y
    block = knobs["block"] * 2 // flat.element_size()
    parts = _parts(flat, block)
    if parts > 1:
        words, options = _cleared_words(rows, parts, x.device)
        _split_kernel[(rows * parts,)](
            flat, y, words, width, flat.stride(0), width,
            BLOCK=block, num_warps=knobs["warps"], maxnreg=knobs["registers"], **options,
        )  # fmt: skip
    else:
        _long_kernel[(rows,)](
            flat, y, width, flat.stride(0), width, BLOCK=TWICE["block"], num_warps=TWICE["warps"]
        )  # fmt: skip
    return y


def triton_backward(grad: Tensor, y: Tensor, *, config: Config | None = None) -> Tensor:
    """``reference_backward`` in Triton."""
    require("softmax backward", grad, y)
    g, flat = rows_of(grad), rows_of(y)
    dx = torch.empty(y.shape, device=y.device, dtype=y.dtype)
    rows, width = flat.shape
    if not flat.numel():
        return dx
    knobs = config or choose("softmax.backward", width, y.device, backward_rule)
    strides = (g.stride(0), flat.stride(0))
    if width <= ONE_PASS:
        grid = (-(-rows // knobs["rows"]),)
        block = next_power_of_2(width)
        _rows_backward_kernel[grid](
            g, flat, dx, rows, width, *strides, ROWS=knobs["rows"], BLOCK=block, num_warps=knobs["warps"]
        )
        return dx
    block = knobs["block"] * 2 // flat.element_size()
    parts = _parts(flat, block)
    if parts > 1:
        words, options = _cleared_words(rows, parts, y.device)
        _split_backward_kernel[(rows * parts,)](
            g, flat, dx, words, width, *strides,
            BLOCK=block, num_warps=knobs["warps"], maxnreg=knobs["registers"], **options,
        )  # fmt: skip
    else:
        _long_backward_kernel[(rows,)](
            g, flat, dx, width, *strides, BLOCK=TWICE["block"], num_warps=TWICE["warps"]
        )  # fmt: skip
    return dx


@torch.library.custom_op("transect::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    """The operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the reference."""
    return triton_softmax(x) if runs_triton(x) else reference(x)


@torch.library.custom_op("transect::softmax_backward", mutates_args=())
def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Its gradient, as an operator of its own."""
    return triton_backward(grad, y) if runs_triton(grad, y) else reference_backward(grad, y)


@softmax.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, device=x.device, dtype=x.dtype)


@softmax_backward.register_fake
def _(grad: Tensor, y: Tensor) -> Tensor:
    return torch.empty(y.shape, device=y.device, dtype=y.dtype)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return softmax_backward(grad, y)


softmax.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor) -> Cost:
    """5 FLOPs an element: maximum, subtract, exp, add, product."""
    return Cost(5 * x.numel(), x.nbytes, x.nbytes)


def _peer(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _examples() -> Sequence[dict[str, Any]]:
    made = [{"x": 3 * sample(*shape)} for shape in ((5, 33), (2, 3, 130), (1, 1), (3, 0), (0, 4))]
    extreme = 5 * sample(4, 40)
    extreme[0] = -float("inf")
    extreme[1, 5:] = -float("inf")
    extreme[2, 3] = 1e4
    extreme[3] -= 1e4
    return [*made, {"x": extreme}, {"x": 4 * sample(2, ONE_PASS + 7)}]


def _cases() -> Sequence[Case]:
    def case(name: str, rows: int, width: int, directions: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            return {"x": 4 * torch.randn(rows, width, device=device, dtype=torch.bfloat16, generator=generator)}

        return Case(f"{name}, [{rows}, {width}]", make, directions=directions, only=only)

    made = [case("attention scores", shapes.rows_for_bytes(2 * width), width) for width in (1024, 4096, 16384)]
    for name, model in shapes.by_size(lambda model: model.vocab_size):
        width = model.vocab_size
        made.append(case(f"vocabulary of {name}", shapes.rows_for_bytes(2 * width), width))
        for rows in shapes.DECODE_ROWS:
            made.append(case(f"vocabulary of {name}", rows, width, ("forward",), ("triton", "torch")))
    return made


def _kernels() -> Sequence[Kernel]:
    row = {"n_rows": "i32", "n_cols": "i32"}
    forward = {"x_ptr": "*bf16", "y_ptr": "*bf16"}
    backward = {"g_ptr": "*bf16", "y_ptr": "*bf16", "dx_ptr": "*bf16"}
    strides, back_strides = {"x_stride": "i32", "y_stride": "i32"}, {"g_stride": "i32", "y_stride": "i32"}
    long, words = {"n_cols": "i32"}, {"words_ptr": "*i64", "n_cols": "i32"}
    sizes = ("n_cols", "x_stride", "y_stride", "g_stride")
    tile, part = {"ROWS": 1, "BLOCK": 4096}, {"PARTS": 16, "HELD": 16, "BLOCK": 8192, "EARLY": False}
    nvidia = ("sm_80", "sm_90")

    def split(name: str, function: Any, arguments: dict[str, str]) -> Kernel:
        return Kernel(f"{name}, long rows split", function, arguments, part, sizes, warps=4, targets=nvidia)

    def twice(name: str, function: Any, arguments: dict[str, str]) -> Kernel:
        return Kernel(f"{name}, long rows read twice", function, arguments, {"BLOCK": 8192}, sizes, warps=8)

    return [
        Kernel(
            "no part's word is there", _clear_kernel, {"words_ptr": "*i64", "n": "i32"}, {"BLOCK": 1024, "EARLY": False}
        ),
        Kernel("forward, 4096 wide", _rows_kernel, {**forward, **row, **strides}, tile, sizes, warps=8),
        split("forward", _split_kernel, {**forward, **words, **strides}),
        twice("forward", _long_kernel, {**forward, **long, **strides}),
        Kernel("backward, 4096 wide", _rows_backward_kernel, {**backward, **row, **back_strides}, tile, sizes, warps=8),
        split("backward", _split_backward_kernel, {**backward, **words, **back_strides}),
        twice("backward", _long_backward_kernel, {**backward, **long, **back_strides}),
    ]


def _prepare_backward(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"grad": torch.randn_like(inputs["x"]), "y": torch.softmax(inputs["x"], -1)}


_CHOICES = {
    "rows": (1, 2, 4),
    "block": (4096, 8192, 16384),
    "warps": (1, 2, 4, 8, 16),
    "registers": (64, 72, 80, 96, 104, 112, 128),
}


def _valid(config: Mapping[str, Any], width: int) -> bool:
    """Rows: 8 to 64 elements a thread. Parts of rows: 32 to 128, and registers for them."""
    if "rows" in config:
        return 8 <= config["rows"] * next_power_of_2(width) / (32 * config["warps"]) <= 64
    held = config["block"] / (32 * config["warps"])
    return 32 <= held <= 128 and held / 2 + 32 <= config["registers"] <= held + 48


def _width(inputs: Mapping[str, Any]) -> int:
    return inputs["x"].shape[-1]


register(
    Op(
        name="softmax",
        reference=reference,
        cost=cost,
        implementations={
            "triton": Implementation(
                "triton", available(triton_softmax), TRITON_TARGETS, batch_invariant=True, autograd=lambda: softmax
            )
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x",),
        gradient_cost=lambda x: Cost(4 * x.numel(), 2 * x.nbytes, x.nbytes),
        cases=_cases,
        kernels=_kernels,
        knobs=[
            Knobs("softmax", _CHOICES, rule, triton_softmax, dict, _width, _valid),
            Knobs("softmax.backward", _CHOICES, backward_rule, triton_backward, _prepare_backward, _width, _valid),
        ],
    )
)
