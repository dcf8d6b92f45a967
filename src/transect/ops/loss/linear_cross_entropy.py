r"""The loss of a language model from its last hidden states, without ever holding the logits of all tokens.

    z_t = x_t W^T        loss = 1/n sum_t (log sum_v exp z_tv - z_t,target(t))        n: tokens not ignored

Backward, for an upstream gradient g of the loss, with p = softmax(z):

    dz_tv = g / n (p_tv - [v = target(t)])        dx = dz W        dW = dz^T x

dz costs nothing extra while z is at hand, so the forward pass makes both gradients, a chunk of tokens at a time: z for
that chunk, its loss, dz in place of z, then the chunk's dx and its share of dW. The backward pass multiplies by g, in
place, and not at all where g is 1 (it looks on the device). Memory beside the gradients is LOSS_CHUNK x V logits
instead of T x V, and the products are the same three that autograd makes.

Shapes: x ``[T, D]``, weight ``[V, D]`` of one dtype, target ``[T]`` int64 (``ignore_index`` counts for nothing), loss a
float32 scalar. Logits are rounded to x's dtype, sums over the vocabulary are float32. dW is kept in the weight's dtype
while the shares of the chunks are added to it. On Hopper each share is rounded, and the copy engine has the L2 cache
add it, which saves reading dW; elsewhere the sum is float32 and rounded once a chunk. ``choose`` says which products
cuBLAS runs.

Bound by arithmetic: 6 T V D FLOPs with gradients against 2 (T + V) D elements read.
Source: chunks as in Liger (Hsu et al. 2024, arXiv:2410.10989); never holding logits: Wijmans et al. 2024,
arXiv:2411.09009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.memory.sizes import LOSS_CHUNK
from ...costs.work import Cost
from ...hardware.device import target_of
from ...hardware.targets import BULK_TARGETS
from .. import shapes
from ..lang.jit import INTERPRETED, TRITON_TARGETS, available, kernel, multiprocessors, require, tl
from ..lang.tiles import describe, dot, fits_descriptor
from ..linear.many_rows.matmul import matmul
from ..linear.many_rows.triton import tile_of
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Case, Implementation, Kernel, Knobs, Op, register
from ..tuning import Config
from ..tuning import choose as tuned

IGNORE = -100
BM, BN, BK, WARPS = 128, 256, 64, 8
"""Rows and columns of a tile of dW, tokens of a step, warps."""
ROW_STAGES = 4
"""Pipeline stages of the loads of the loss kernel."""


def reference(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Compute the mean loss of x ``[T, D]``, weight ``[V, D]``, target ``[T]`` (0 where every token is ignored)."""
    dtype = compute_dtype(x.dtype)
    total = F.cross_entropy(x.to(dtype) @ weight.to(dtype).T, target, ignore_index=ignore_index, reduction="sum")
    return total / (target != ignore_index).sum().clamp(min=1)


@kernel
def _loss_and_gradient(  # type: ignore[no-untyped-def]
    logits, target, loss, count, T, V, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the loss of each row over ``count``, and replace the logits by its gradient.

    Few programs take the rows in turn: their rows in progress together then fit the L2 cache, where the second pass,
    backwards, finds it. Maximum and sum are kept for each lane of 8 neighbours (see ``first/softmax_kernels.py``).
    """
    lane = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    share = 1.0 / tl.maximum(tl.load(count), 1).to(tl.float32)
    blocks = tl.cdiv(V, BLOCK)
    stride = tl.full((), 0, tl.int64) + row_stride
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        wanted = tl.load(target + row)
        z = logits + row * stride
        real = wanted != ignore_index
        peak = tl.full((BLOCK // 8,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK // 8,), tl.float32)
        for block in tl.range(blocks, num_stages=STAGES):
            v = block * BLOCK + lane
            x = tl.load(z + v, v < V, -float("inf")).to(tl.float32)
            new = tl.maximum(peak, tl.max(x, 1))
            shift = tl.where(new == -float("inf"), 0.0, new)
            e = tl.exp2((x - shift[:, None]) * 1.4426950408889634)
            total = total * tl.exp2((peak - shift) * 1.4426950408889634) + tl.sum(e, 1)
            peak = new
        top = tl.max(peak, 0)
        mass = tl.sum(total * tl.exp2((peak - top) * 1.4426950408889634), 0)
        at_target = tl.load(z + wanted, real, 0.0).to(tl.float32)
        tl.store(loss + row, tl.where(real, (top + tl.log(mass) - at_target) * share, 0.0))
        if GRADIENT:
            tl.debug_barrier()  # the target's logit is read before it is overwritten
            weight = tl.where(real, share, 0.0)
            scale = weight / mass
            for block in tl.range(blocks, num_stages=STAGES):
                v = (blocks - 1 - block) * BLOCK + lane
                x = tl.load(z + v, v < V, 0.0).to(tl.float32)
                p = tl.exp2((x - top) * 1.4426950408889634) * scale - tl.where(v == wanted, weight, 0.0)
                tl.store(z + v, p.to(logits.dtype.element_ty), v < V)
            tl.debug_barrier()


@kernel
def _weight_gradient(  # type: ignore[no-untyped-def]
    dz, x, dw, V, D, T,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Compute dw ``[V, D]`` = dz ``[T, V]``^T x ``[T, D]``, all given as tensor descriptors; with ADD the L2 cache adds
    it to the old values. Two stores of half a tile need half the shared memory, which allows another stage of loads."""
    rows_of_tiles = tl.cdiv(V, BM)
    columns_of_tiles = tl.cdiv(D, BN)
    tiles = rows_of_tiles * columns_of_tiles
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, rows_of_tiles, columns_of_tiles, GROUP)
        m = tile_m * BM
        n = tile_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(tl.cdiv(T, BK)):
            acc = dot(dz.load([step * BK, m]).T, x.load([step * BK, n]), acc)
        left, right = acc.reshape((BM, 2, BN // 2)).permute((0, 2, 1)).split()
        _put(dw, m, n, left, ADD)
        _put(dw, m, n + BN // 2, right, ADD)


@kernel
def _put(out, m, n, acc, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile to what a descriptor describes, or add it there."""
    if ADD:
        out.atomic_add([m, n], acc.to(out.dtype))
    else:
        out.store([m, n], acc.to(out.dtype))


@kernel
def _scale(values, g, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply in place by a number on the device; nothing is touched if that is 1."""
    factor = tl.load(g).to(tl.float32)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(values + at, at < N).to(tl.float32) * factor
            tl.store(values + at, value.to(values.dtype.element_ty), at < N)


@dataclass(frozen=True, slots=True)
class LossTiling:
    """Knobs: tokens of a chunk; order and stages of dW's tiles (``_weight_gradient``); programs a multiprocessor and
    elements of a step of the loss kernel."""

    chunk: int = LOSS_CHUNK
    group: int = 8
    stages: int = 4
    rows: int = 2
    block: int = 4096
    row_warps: int = 8
    library: str = ""
    """Products left to torch: ``z``, ``dx``, ``dw``."""


CHOICES = {
    "library": ("", "dx", "dw dx", "dx z", "dw dx z"),
    "group": (4, 8, 16),
    "stages": (3, 4),
    "rows": (2, 4),
    "block": (2048, 4096),
    "row_warps": (4, 8),
}
"""The knobs that ``transect tune`` may try. The tokens of a chunk are not among them, because they decide about
memory."""
Size = tuple[int, int, int]


def chunk_of(dim: int) -> int:
    """Return the tokens of a chunk: more where the model is narrow, because otherwise dW would be added to too
    often."""
    return LOSS_CHUNK if dim >= 4096 else 2 * LOSS_CHUNK


def rule(size: Size) -> Config:
    """Choose the knobs for T, V, D. Measured on an H200, where cuBLAS is faster at some of the products: dX has few
    tiles and a long sum, which cuBLAS splits; dW of a narrow model is written so often that reading it costs little."""
    dim = size[2]
    knobs: dict[str, Any] = {"group": 8, "stages": 4}
    if dim >= 4096:
        return knobs | {"library": "dx", "rows": 2, "block": 4096, "row_warps": 8}
    return knobs | {"library": "dw dx" if dim >= 2048 else "dw dx z", "rows": 4, "block": 2048, "row_warps": 4}


def choose(weight: Tensor, x: Tensor) -> LossTiling:
    """Choose the knobs for a product with ``weight``: tuned, or by ``rule``."""
    if INTERPRETED or x.element_size() != 2 or not target_of(x.device).bulk_copies:
        return LossTiling()
    size = (x.shape[0], *weight.shape)
    return LossTiling(chunk=chunk_of(size[2]), **tuned("linear_cross_entropy", size, x.device, rule))


def add_weight_gradient(dz: Tensor, x: Tensor, dw: Tensor, first: bool, tiling: LossTiling) -> None:
    """Compute dw ``[V, D]`` = (``first``) or += dz ``[T, V]``^T x ``[T, D]``."""
    if "dw" in tiling.library:
        torch.addmm(dw, dz.T, x, beta=0 if first else 1, out=dw)
        return
    bulk = not INTERPRETED and x.element_size() == 2 and target_of(x.device).bulk_copies
    if not bulk or not fits_descriptor(dz, x, dw):
        matmul(dz.T, x.T, residual=None if first else dw, out=dw)
        return
    vocab, dim = dw.shape
    programs = min(multiprocessors(x.device), -(-vocab // BM) * -(-dim // BN))
    _weight_gradient[(programs,)](
        describe(dz, BK, BM), describe(x, BK, BN), describe(dw, BM, BN // 2), vocab, dim, x.shape[0], BM=BM, BN=BN,
        BK=BK, GROUP=tiling.group, PROGRAMS=programs, ADD=not first, num_warps=WARPS, num_stages=tiling.stages,
    )  # fmt: skip


def _product(a: Tensor, b: Tensor, out: Tensor, library: bool) -> None:
    """Compute out = a b, by torch or by ``linear/many_rows/matmul.py``."""
    if library:
        torch.mm(a, b, out=out)
    else:
        matmul(a, b.T, out=out)


def row_losses(
    logits: Tensor, target: Tensor, losses: Tensor, count: Tensor, ignore_index: int, gradient: bool, tiling: LossTiling
) -> None:
    """Compute the loss of each row of ``logits`` ``[T, V]`` over ``count``; with ``gradient`` replace the row by its
    gradient."""
    tokens, vocab = logits.shape
    _loss_and_gradient[(min(tokens, tiling.rows * multiprocessors(logits.device)),)](
        logits, target, losses, count, tokens, vocab, logits.stride(0), ignore_index, GRADIENT=gradient,
        BLOCK=64 if INTERPRETED else tiling.block, STAGES=ROW_STAGES, num_warps=tiling.row_warps,
    )  # fmt: skip


def loss_and_gradients(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, need_x: bool, need_weight: bool,
    tiling: LossTiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the loss, and the gradients of x and weight for an upstream gradient of 1 (empty where not needed)."""
    require("linear_cross_entropy", x, weight)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or target.shape != x.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: x [T, D], weight [V, D] and target [T] do not fit: {list(x.shape)}, "
            f"{list(weight.shape)}, {list(target.shape)}"
        )
    tiling = tiling or choose(weight, x)
    x, weight = x.detach(), weight.detach()
    tokens, vocab = x.shape[0], weight.shape[0]
    losses = torch.zeros(tokens, dtype=torch.float32, device=x.device)
    dx = torch.empty(x.shape if need_x else 0, dtype=x.dtype, device=x.device)
    dw = torch.empty(weight.shape if need_weight else 0, dtype=weight.dtype, device=x.device)
    if tokens == 0:
        return losses.sum(), dx, dw.zero_()
    count = (target != ignore_index).sum()
    target = target.contiguous()
    z = x.new_empty((min(tiling.chunk, tokens), vocab))
    for start in range(0, tokens, tiling.chunk):
        part = x[start : start + tiling.chunk]
        chunk = slice(start, start + part.shape[0])
        logits = z[: part.shape[0]]
        _product(part, weight.T, logits, "z" in tiling.library)
        row_losses(logits, target[chunk], losses[chunk], count, ignore_index, need_x or need_weight, tiling)
        if need_x:
            _product(logits, weight, dx[chunk], "dx" in tiling.library)
        if need_weight:
            add_weight_gradient(logits, part, dw, start == 0, tiling)
    return losses.sum(), dx, dw


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Compute ``reference`` with the logits of LOSS_CHUNK tokens at a time; the loss only."""
    return loss_and_gradients(x, weight, target, ignore_index, False, False)[0]


@torch.library.custom_op("transect::linear_cross_entropy", mutates_args=())
def _op(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int = IGNORE,
    need_x: bool = True,
    need_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    return loss_and_gradients(x, weight, target, ignore_index, need_x, need_weight)


@_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int = IGNORE,
    need_x: bool = True,
    need_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape if need_x else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
    )


def scale_in_place(values: Tensor, g: Tensor) -> None:
    """Compute ``values *= g`` for a contiguous tensor and a number on its device, without a read on the host."""
    if values.numel():
        programs = min(-(-values.numel() // 4096), 8 * multiprocessors(values.device))
        _scale[(programs,)](values, g, values.numel(), BLOCK=4096, num_warps=8)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)  # else the backward pass gets zeros as large as both gradients, which have none
    ctx.gradients = output[1:]
    ctx.needs = inputs[4:6]


def _backward(ctx: Any, g: Tensor, _dx: Any, _dw: Any) -> tuple[Tensor | None, ...]:
    # In place, and with no reference kept: a copy of dW would be the largest tensor of the step.
    if ctx.gradients is None:
        raise RuntimeError(
            "linear_cross_entropy: its gradients are used up by the first backward pass; compute the loss again for a "
            "second one"
        )
    dx, dw = ctx.gradients
    ctx.gradients = None
    if type(dx) is Tensor:
        scale_in_place(dx, g)
        scale_in_place(dw, g)
    else:  # traced by torch.compile, which decides about memory itself
        dx, dw = dx * g.to(dx.dtype), dw * g.to(dw.dtype)
    need_x, need_weight = ctx.needs
    return dx if need_x else None, dw if need_weight else None, None, None, None, None


_op.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy_autograd(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Compute ``linear_cross_entropy`` with gradients, which the forward pass computes; ``backward`` can run once."""
    need_x, need_weight = (torch.is_grad_enabled() and t.requires_grad for t in (x, weight))
    # Through a view: autograd takes over a gradient only if no Python object refers to it (torch 2.11), else it copies.
    return _op(x.view(x.shape), weight.view(weight.shape), target, ignore_index, need_x, need_weight)[0]


linear_cross_entropy_autograd.operator = _op  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Cost:
    """Count one product, without the softmax."""
    return Cost(2 * x.shape[0] * weight.numel(), x.nbytes + weight.nbytes + target.nbytes, 4)


def gradient_cost(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Cost:
    """Count two products."""
    return Cost(4 * x.shape[0] * weight.numel(), x.nbytes + weight.nbytes, x.nbytes + weight.nbytes)


def _peer(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Compute all logits with torch, then its cross entropy."""
    return F.cross_entropy(F.linear(x, weight), target, ignore_index=ignore_index)


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(tokens: int, vocab: int, dim: int, ignored: int) -> dict[str, Any]:
        target = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(2))
        target[:ignored] = IGNORE
        return {
            "x": sample(tokens, dim), "weight": 3 * sample(vocab, dim, seed=1) / math.sqrt(dim), "target": target
        }  # fmt: skip

    return [inputs(1, 5, 3, 0), inputs(17, 130, 24, 3), inputs(33, 40, 16, 0)]


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape, tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            weight = torch.randn(model.vocab_size, model.dim, **options) * model.dim**-0.5
            target = torch.randint(0, model.vocab_size, (tokens,), device=device, generator=generator)
            target[::7] = IGNORE
            return {"x": torch.randn(tokens, model.dim, **options), "weight": weight, "target": target}

        return Case(f"{model.name}, {tokens} x {model.dim} x {model.vocab_size}", make)

    return [case(model, tokens) for tokens in shapes.PREFILL_ROWS for model in shapes.MODELS]


def _kernels() -> Sequence[Kernel]:
    return [
        Kernel(
            name="loss_and_gradient",
            function=_loss_and_gradient,
            arguments={
                "logits": "*bf16", "target": "*i64", "loss": "*fp32", "count": "*i64", "T": "i32", "V": "i32",
                "row_stride": "i32", "ignore_index": "i32",
            },
            constants={"GRADIENT": True, "BLOCK": 4096, "STAGES": ROW_STAGES},
            divisible=("V", "row_stride"),
            warps=8,
            targets=TRITON_TARGETS,
        ),
        Kernel(
            name="weight_gradient",
            function=_weight_gradient,
            arguments={
                "dz": "tensordesc<bf16[64, 128]>", "x": "tensordesc<bf16[64, 256]>",
                "dw": "tensordesc<bf16[128, 128]>", "V": "i32", "D": "i32", "T": "i32",
            },
            constants={"BM": BM, "BN": BN, "BK": BK, "GROUP": 8, "PROGRAMS": 132, "ADD": True},
            divisible=("V", "D", "T"),
            warps=WARPS,
            stages=4,
            targets=BULK_TARGETS,
        ),
        Kernel(
            name="scale",
            function=_scale,
            arguments={"values": "*bf16", "g": "*fp32", "N": "i64"},
            constants={"BLOCK": 4096},
            divisible=("N",),
            warps=8,
            targets=TRITON_TARGETS,
        ),
    ]  # fmt: skip


def _size(inputs: Mapping[str, Any]) -> Size:
    return (inputs["x"].shape[0], *inputs["weight"].shape)


def _valid(config: Config, size: Size) -> bool:
    """Check that a thread reads 8 elements an access, and that a multiprocessor has 16 warps for the rows' losses;
    knobs of dW only where it is not computed by the library."""
    rows = config["block"] == 512 * config["row_warps"] and config["rows"] * config["row_warps"] == 16
    return rows and ("dw" not in config["library"] or (config["group"], config["stages"]) == (8, 4))


def _with(config: Config, *, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Any:
    tiling = LossTiling(chunk=chunk_of(x.shape[1]), **config)
    return loss_and_gradients(x, weight, target, ignore_index, True, True, tiling)


register(
    Op(
        name="linear_cross_entropy",
        reference=reference,
        cost=cost,
        gradient_cost=gradient_cost,
        implementations={
            "triton": Implementation(
                "triton",
                available(linear_cross_entropy),
                TRITON_TARGETS,
                autograd=available(linear_cross_entropy_autograd),
            )
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x", "weight"),
        directions=("forward", "both"),
        cases=_cases,
        kernels=_kernels,
        knobs=lambda: [Knobs("linear_cross_entropy", CHOICES, rule, _with, dict, _size, _valid)],
    )
)
