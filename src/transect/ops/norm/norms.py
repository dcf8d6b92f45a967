"""Share parts of the norms: launching their kernels, summing the gradients of the weights, shapes to measure.

Shapes: x and the residual stream ``[..., D]``, weight and bias ``[D]``. The kernels themselves, and the math, are in
``rms_norm.py`` and ``layer_norm.py``; with a residual added first, in ``add_rms_norm.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import shapes
from ..lang.jit import has_dependent_launch, kernel, multiprocessors, next_power_of_2, require, rows_of, tl
from ..lang.tiles import wait_for_previous
from ..registry import Case, Kernel, Knobs
from ..tuning import Config, choose, row_rule

MAX_WIDTH = 65536
"""The longest row that a program holds."""
STAGED_BYTES = 96 * 1024
"""Shared memory for the rows that a program has in flight."""


def _row_stride(x: Tensor) -> int:
    """Return the elements from one row to the next, of a contiguous tensor or a matrix."""
    return x.stride(0) if x.dim() == 2 else x.shape[-1]


def _whole_rows(x: Tensor) -> bool:
    """Return True if ``x`` is contiguous, or a matrix with contiguous rows."""
    return x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)


def _check_width(name: str, width: int) -> None:
    if width > MAX_WIDTH:
        raise ValueError(f"{name}: a row of {width} elements is past {MAX_WIDTH}; use the reference")


def launch_forward(
    name: str,
    function: Any,
    x: Tensor,
    residual: Tensor | None,
    vectors: Sequence[Tensor],
    eps: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    dependent_launch: bool = False,
    own_tuning: bool = True,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (norm, sum) of x, or of x + residual; without a residual the sum is x itself.

    ``vectors`` are the weight and, for LayerNorm, the bias. ``out`` takes the two results, which may be x and the
    residual themselves; the rows of the first may be apart (of a matrix ``[rows, D]``). ``own_tuning``: with the
    configurations that this user found, see ``tuning.choices``.

    Raises:
        ValueError: dtypes without a kernel, a row past ``MAX_WIDTH``, a residual or ``out`` unlike x.
    """
    given = (x, *vectors) if residual is None else (x, residual, *vectors)
    require(name, *given)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{name}: x and residual must have one shape and dtype; got {list(x.shape)} {x.dtype} and "
            f"{list(residual.shape)} {residual.dtype}"
        )
    flat = rows_of(x)
    rows, width = flat.shape
    _check_width(name, width)
    if out is None:
        y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        total = x if residual is None else torch.empty(x.shape, device=x.device, dtype=x.dtype)
    else:
        y, total = out
        fits = all(t.shape == x.shape and t.dtype == x.dtype for t in out)
        if not fits or not _whole_rows(y) or not (residual is None or total.is_contiguous()):
            raise ValueError(
                f"{name}: out must be two contiguous tensors of {x.dtype}, {list(x.shape)} each; only the rows of the "
                "first may be apart"
            )
    if not flat.numel():
        return y, total
    knobs = config or choose(name, width, x.device, row_rule, own_tuning)
    other = flat if residual is None else rows_of(residual)
    function[(-(-rows // knobs["rows"]),)](
        flat, other, *(vector.contiguous() for vector in vectors), y, total,
        rows, width, flat.stride(0), other.stride(0), _row_stride(y), eps, ADD=residual is not None, ROWS=knobs["rows"],
        BLOCK=next_power_of_2(width), DEPENDENT_LAUNCH=dependent_launch, num_warps=knobs["warps"],
        **({"launch_pdl": True} if dependent_launch else {}),
    )  # fmt: skip
    return y, total


@kernel
def _add_shares_kernel(
    shares_ptr, first_ptr, second_ptr, n_shares, n_cols, SHARES: tl.constexpr, COLS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Add up the programs' shares ``[vectors, n_shares, n_cols]``, COLS columns of one vector a program."""
    wait_for_previous(DEPENDENT_LAUNCH)
    share = tl.arange(0, SHARES)[:, None]
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    shares_ptr += tl.program_id(1).to(tl.int64) * n_shares * n_cols
    total = tl.zeros([SHARES, COLS], tl.float32)
    for start in range(0, n_shares, SHARES):
        inside = (start + share < n_shares) & (col < n_cols)
        total += tl.load(shares_ptr + (start + share) * n_cols + col, mask=inside, other=0.0)
    total = tl.sum(total, 0)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + col, total.to(first_ptr.dtype.element_ty), mask=col < n_cols)
    else:
        tl.store(second_ptr + col, total.to(second_ptr.dtype.element_ty), mask=col < n_cols)


def backward_rule(width: int) -> Config:
    """Choose 32 elements a thread in whole warps, and enough programs for 16 warps a multiprocessor."""
    warps = min(16, max(1, next_power_of_2(width) // 512))
    return {"warps": warps, "waves": max(1, 16 // warps), "stages": 3}


def tile_rule(width: int) -> Config:
    """Return ``backward_rule`` for kernels on tiles of rows: one row each."""
    return {**backward_rule(width), "rows": 1}


def launch_backward(
    name: str,
    function: Any,
    grad: Tensor,
    x: Tensor,
    grad_sum: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    vectors: int,
    tiles: bool = False,
    out: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, ...]:
    """Compute (dL/dx, dL/dw and, of 2 ``vectors``, dL/db). ``grad_sum``, if given, is added to dL/dx. ``tiles``: the
    kernel takes ROWS rows at a time. ``out``: the tensor to write dL/dx to, like a matrix x; its rows may have any
    stride.

    A fixed number of programs, each with the same number of rows, keep their shares of dL/dw in registers. A second
    launch adds the shares in order. Where the device can, both are launched while the kernel before them ends.
    """
    given = (grad, x, weight) if grad_sum is None else (grad, x, grad_sum, weight)
    require(name, *given)
    g, flat = rows_of(grad), rows_of(x)
    rows, width = flat.shape
    _check_width(name, width)
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype) if out is None else out
    if dx.shape != x.shape or dx.dtype != x.dtype or not _whole_rows(dx):
        raise ValueError(f"{name}: out must be of {x.dtype} and like x, {list(x.shape)}, with whole rows")
    if not flat.numel():
        return dx, *(torch.zeros_like(weight) for _ in range(vectors))
    made = [torch.empty(weight.shape, device=x.device, dtype=weight.dtype) for _ in range(vectors)]
    up = g if grad_sum is None else rows_of(grad_sum)
    knobs = config or choose(name, width, x.device, tile_rule if tiles else backward_rule)
    block = next_power_of_2(width)
    at_once = knobs.get("rows", 1) if tiles else 1
    staged = at_once * block * x.element_size() * (2 if grad_sum is None else 3)
    pieces = -(-rows // at_once)
    rounds = -(-pieces // (multiprocessors(x.device) * knobs["waves"]))
    programs = -(-pieces // rounds)
    dependent_launch = has_dependent_launch(x.device)
    options: dict[str, Any] = {"DEPENDENT_LAUNCH": dependent_launch} | (
        {"launch_pdl": True} if dependent_launch else {}
    )
    buffers = STAGED_BYTES // staged  # of one alone a program waits for each tile
    stages = min(knobs["stages"], 1 + buffers) if buffers > 1 else 1
    shares = torch.empty(vectors, programs, width, device=x.device, dtype=torch.float32)
    function[(programs,)](
        g, flat, up, weight.contiguous(), dx, *shares, rows, width, g.stride(0), flat.stride(0), up.stride(0),
        _row_stride(dx), eps,
        ADD=grad_sum is not None, BLOCK=block, STAGES=stages, num_warps=knobs["warps"], **options,
        **({"ROWS": at_once} if tiles else {}),
    )  # fmt: skip
    grid = (-(-width // 32), vectors)
    _add_shares_kernel[grid](shares, made[0], made[-1], programs, width, SHARES=256, COLS=32, num_warps=8, **options)
    return dx, *made


FORWARD_CHOICES = {"rows": (1, 2, 4), "warps": (1, 2, 4, 8, 16)}
BACKWARD_CHOICES = {"warps": (1, 2, 4, 8, 16), "waves": (1, 2, 3, 4, 6, 8, 16), "stages": (1, 2, 3, 4)}
TILE_CHOICES = {"rows": (1, 2, 4)}


def knobs(name: str, forward: Any, backward: Any, *, tiles: bool = False) -> Sequence[Knobs]:
    """Return the knobs of the two launchers of the norm ``name``; ``tiles`` as for ``launch_backward``."""
    choices, rule = (BACKWARD_CHOICES | TILE_CHOICES, tile_rule) if tiles else (BACKWARD_CHOICES, backward_rule)
    return [
        Knobs(name, FORWARD_CHOICES, row_rule, forward, dict, _width),
        Knobs(f"{name}.backward", choices, rule, backward, _with_upstream, _width),
    ]


def _width(inputs: Mapping[str, Any]) -> int:
    return inputs["x"].shape[-1]


def _with_upstream(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a gradient's launcher, from those of the norm."""
    kept = {key: inputs[key] for key in ("weight", "eps")}
    if "residual" not in inputs:
        return {"grad": torch.randn_like(inputs["x"]), "x": inputs["x"], **kept}
    total = inputs["x"] + inputs["residual"]
    return {"grad": torch.randn_like(total), "grad_sum": torch.randn_like(total), "total": total, **kept}


EAGER = ("triton", "torch")
"""Contenders where ``torch.compile`` is left out."""


def cases(*, vectors: int, add: bool) -> Sequence[Case]:
    """List the cases of each width: rows of 256 MB, of a prefill and of a decode step.

    The norm has ``vectors`` vectors (the weight, and the bias of LayerNorm), and a residual if ``add``.

    ``torch.compile`` is raced at the largest of the first model, where it takes its time to compile only once.
    """

    def case(name: str, width: int, rows: int, directions: tuple[str, ...], only: tuple[str, ...]) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)

            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

            made = {key: normal(rows, width) for key in (("x", "residual") if add else ("x",))}
            made |= {key: normal(width) for key in ("weight", "bias")[:vectors]}
            return {**made, "eps": 1e-5}

        return Case(f"{name}, {rows} tokens x {width}", make, directions=directions, only=only)

    listed = []
    for name, model in shapes.by_size(lambda model: model.dim):
        many = shapes.rows_for_bytes(2 * model.dim)
        listed.append(case(name, model.dim, many, (), () if model is shapes.LLAMA_8B else EAGER))
        listed += [case(name, model.dim, rows, (), EAGER) for rows in shapes.PREFILL_ROWS]
        listed += [case(name, model.dim, rows, ("forward",), EAGER) for rows in shapes.DECODE_ROWS]
    return listed


def kernels(forward: Any, backward: Any, *, vectors: int, add: bool, tiles: bool = False) -> Sequence[Kernel]:
    """Return the two kernels of a norm at 4096 elements a row, and what adds the shares up; ``tiles`` as for
    ``launch_backward``."""
    parameters = ("w_ptr", "b_ptr")[:vectors]
    tensors = ("x_ptr", "residual_ptr", *parameters, "y_ptr", "sum_ptr")
    ahead = {
        **dict.fromkeys(tensors, "*bf16"),
        **dict.fromkeys(("n_rows", "n_cols", "x_stride", "r_stride", "y_stride"), "i32"),
    }
    back = dict.fromkeys(("g_ptr", "x_ptr", "up_ptr", "w_ptr", "dx_ptr"), "*bf16")
    back |= dict.fromkeys(("dw_ptr", "db_ptr")[:vectors], "*fp32")
    back |= dict.fromkeys(("n_rows", "n_cols", "g_stride", "x_stride", "up_stride", "dx_stride"), "i32")
    sizes = ("n_cols", "x_stride", "r_stride", "y_stride", "g_stride", "up_stride", "dx_stride")
    shares = {"shares_ptr": "*fp32", "first_ptr": "*bf16", "second_ptr": "*bf16", "n_shares": "i32", "n_cols": "i32"}
    one_row = {"ADD": add, "ROWS": 1, "BLOCK": 4096, "DEPENDENT_LAUNCH": False}
    staged = {"ADD": add, "BLOCK": 4096, "STAGES": 3, "DEPENDENT_LAUNCH": False} | ({"ROWS": 2} if tiles else {})
    added = {"SHARES": 256, "COLS": 32, "DEPENDENT_LAUNCH": False}
    return [
        Kernel("forward", forward, {**ahead, "eps": "fp32"}, one_row, sizes, warps=8),
        Kernel("backward", backward, {**back, "eps": "fp32"}, staged, sizes, warps=8),
        Kernel("shares of the weights' gradients", _add_shares_kernel, shares, added, ("n_cols",), warps=8),
    ]
