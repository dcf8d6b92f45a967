r"""Softmax over the last dimension.

    m = max(x)        y_i = exp(x_i - m) / sum_j exp(x_j - m)

Backward, with g = dL/dy:

    dL/dx_i = y_i * (g_i - sum_j g_j y_j)

Shapes: x and the result ``[..., D]``. float32 inside for half inputs, rounded once at the end. A row that is -inf
throughout has no answer and gives NaN, as in torch.
Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (the running maximum).

Bound by bytes: about 5 FLOPs an element against one read and one write, 5 / (2 * 2) FLOPs per byte in bfloat16, if the
row is read once. A row of up to 32768 elements stays in the registers of one program. A longer one, such as the scores
over a vocabulary, is 256 KB and more: too long for a multiprocessor that should have other rows on their way at the
same time. On NVIDIA GPUs several programs hold a part each, leave the maximum and sum of their part in memory, and wait
for those of the other parts. So the row is still read once.

Elsewhere (AMD, the interpreter), and where a row has more parts than there are multiprocessors, one program reads it
twice. ``softmax_kernels.py`` has both, and says why waiting cannot lock up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang.jit import (
    has_dependent_launch,
    in_triton,
    multiprocessors,
    next_power_of_2,
    require,
    rows_of,
    runs_triton,
)
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Case, Knobs, Op, register
from ..tuning import Config, choose, row_rule
from .softmax_kernels import (
    clear_kernel,
    kernels,
    long_backward_kernel,
    long_kernel,
    rows_backward_kernel,
    rows_kernel,
    split_backward_kernel,
    split_kernel,
)

ONE_PASS = 32768
"""The longest row that stays in registers."""


def reference(x: Tensor) -> Tensor:
    """Compute the softmax of x ``[..., D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    e = (wide - wide.amax(-1, keepdim=True).detach()).exp() if wide.numel() else wide.exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def reference_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Compute dL/dx from dL/dy and the result y, both ``[..., D]``."""
    wide = compute_dtype(y.dtype)
    g, p = grad.to(wide), y.to(wide)
    return (p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)


def rule(width: int) -> Config:
    """Choose the knobs from the row's width alone, so that a row's result does not depend on the number of rows.

    ``block`` counts 16-bit numbers; a program holds half as many of float32. ``registers`` is the most a thread may
    have: with fewer a multiprocessor holds more programs, with too few they spill.
    """
    if width > ONE_PASS:
        return {"block": 16384, "warps": 4, "registers": 120}
    return row_rule(width)


def backward_rule(width: int) -> Config:
    """Return ``rule`` for the backward pass, which holds two tensors."""
    return {"block": 4096, "warps": 2, "registers": 96} if width > ONE_PASS else rule(width)


TWICE: Config = {"block": 8192, "warps": 16}
"""The configuration for long rows that are read twice."""


def _parts(x: Tensor, block: int) -> int:
    """Return the number of parts that the long rows of x are split into; 1: no split."""
    if not x.is_cuda or torch.version.hip:
        return 1
    parts = -(-x.shape[-1] // block)
    return parts if parts <= multiprocessors(x.device) else 1


def _cleared_words(rows: int, parts: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Return a word for every part of every row, which the kernel resets to 0, and the options of the kernel that uses
    the words next."""
    words = torch.empty(rows * parts, device=device, dtype=torch.int64)
    dependent_launch = has_dependent_launch(device)
    clear_kernel[(-(-words.numel() // 1024),)](
        words, words.numel(), BLOCK=1024, DEPENDENT_LAUNCH=dependent_launch, num_warps=4
    )
    options: dict[str, Any] = {"PARTS": parts, "HELD": next_power_of_2(parts), "DEPENDENT_LAUNCH": dependent_launch}
    return words, options | ({"launch_pdl": True} if dependent_launch else {})


def triton_softmax(x: Tensor, *, config: Config | None = None) -> Tensor:
    """Compute ``reference`` in Triton. Any strides; a copy is made only if the elements of a row are not contiguous."""
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
        rows_kernel[grid](
            flat, y, rows, width, flat.stride(0), width, ROWS=knobs["rows"], BLOCK=block, num_warps=knobs["warps"]
        )
        return y
    block = knobs["block"] * 2 // flat.element_size()
    parts = _parts(flat, block)
    if parts > 1:
        words, options = _cleared_words(rows, parts, x.device)
        split_kernel[(rows * parts,)](
            flat, y, words, width, flat.stride(0), width,
            BLOCK=block, num_warps=knobs["warps"], maxnreg=knobs["registers"], **options,
        )  # fmt: skip
    else:
        long_kernel[(rows,)](flat, y, width, flat.stride(0), width, BLOCK=TWICE["block"], num_warps=TWICE["warps"])
    return y


def triton_backward(grad: Tensor, y: Tensor, *, config: Config | None = None) -> Tensor:
    """Compute ``reference_backward`` in Triton."""
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
        rows_backward_kernel[grid](
            g, flat, dx, rows, width, *strides, ROWS=knobs["rows"], BLOCK=block, num_warps=knobs["warps"]
        )
        return dx
    block = knobs["block"] * 2 // flat.element_size()
    parts = _parts(flat, block)
    if parts > 1:
        words, options = _cleared_words(rows, parts, y.device)
        split_backward_kernel[(rows * parts,)](
            g, flat, dx, words, width, *strides,
            BLOCK=block, num_warps=knobs["warps"], maxnreg=knobs["registers"], **options,
        )  # fmt: skip
    else:
        long_backward_kernel[(rows,)](g, flat, dx, width, *strides, BLOCK=TWICE["block"], num_warps=TWICE["warps"])
    return dx


@torch.library.custom_op("transect::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return triton_softmax(x) if runs_triton(x) else reference(x)


@torch.library.custom_op("transect::softmax_backward", mutates_args=())
def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Compute the operator's gradient, as a separate operator."""
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
    """Count 5 FLOPs an element: maximum, subtract, exp, add, product."""
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


def _prepare_backward(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"grad": torch.randn_like(inputs["x"]), "y": torch.softmax(inputs["x"], -1)}


_CHOICES = {
    "rows": (1, 2, 4),
    "block": (4096, 8192, 16384),
    "warps": (1, 2, 4, 8, 16),
    "registers": (64, 72, 80, 96, 104, 112, 120, 128),
}


def _valid(config: Mapping[str, Any], width: int) -> bool:
    """Check the work of a thread: whole rows give it 8 to 64 elements; split rows 32 to 128, and registers for them."""
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
        implementations={"triton": in_triton(triton_softmax, batch_invariant=True, autograd=softmax)},
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x",),
        gradient_cost=lambda x: Cost(4 * x.numel(), 2 * x.nbytes, x.nbytes),
        cases=_cases,
        kernels=kernels,
        knobs=lambda: [
            Knobs("softmax", _CHOICES, rule, triton_softmax, dict, _width, _valid),
            Knobs("softmax.backward", _CHOICES, backward_rule, triton_backward, _prepare_backward, _width, _valid),
        ],
    )
)
