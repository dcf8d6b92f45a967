r"""Rounding to 4 bits that compensates for its own errors (GPTQ; Frantar et al. 2022, arXiv:2210.17323).

A row w of a matrix is rounded to q so that its products with the inputs of a text change least:

    minimise  (w - q) H (w - q)^T        H = mean of x x^T + damping

One column is rounded at a time, in order of falling H_ii. Its error moves the columns that are not rounded yet:

    w_j -= (w_i - q_i) U_ij / U_ii       U: the upper Cholesky factor of the inverse of H, in that order

Scales are those of ``quantized_grid.py``, found before for all groups with the diagonal of H as weights; so a group
stays neighbouring columns, and files need no order.

Shapes: O outputs, I inputs, g columns of a group, G = I / g.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.decoder import Decoder
from .calibration import LayerInputs, layer_inputs
from .quantized_grid import HIGHEST, LOWEST, Grid, grid_of

DAMPING = 0.01
"""Share of the mean of the diagonal that is added to it."""
BLOCK = 128
"""Columns after which the remaining columns are updated at once."""


def compensated(weight: Tensor, products: Tensor, grid: Grid) -> Tensor:
    """Round ``[O, I]``, with products ``[I, I]``, to values on the grid, float32 ``[O, I]``.

    Raises:
        ValueError: the products hold infinite or NaN numbers.
    """
    order = products.diagonal().argsort(descending=True, stable=True)
    upper = _factor(products[order][:, order])
    size = weight.shape[1] // grid.groups
    w = weight.float()[:, order].clone()
    scale, zero = (each.repeat_interleave(size, 1)[:, order] for each in (grid.scale, grid.zero))
    rounded = torch.empty_like(w)
    for first in range(0, w.shape[1], BLOCK):
        last = min(first + BLOCK, w.shape[1])
        part, own = w[:, first:last], upper[first:last, first:last]
        errors = torch.empty_like(part)
        for i in range(last - first):
            column, s, z = part[:, i], scale[:, first + i], zero[:, first + i]
            value = ((column / s + z).round_().clamp_(LOWEST, HIGHEST) - z) * s
            rounded[:, first + i] = value
            errors[:, i] = (column - value) / own[i, i]
            part[:, i + 1 :].addr_(errors[:, i], own[i, i + 1 :], alpha=-1)
        w[:, last:].addmm_(errors, upper[first:last, last:], alpha=-1)
    return rounded[:, order.argsort()]


def _factor(products: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse, damped until it exists."""
    if not bool(products.isfinite().all()):
        raise ValueError("the inputs of a matrix are too large to calibrate it: their products are not finite")
    mean = products.diagonal().mean().clamp(min=1e-12)
    damping = DAMPING
    while True:
        damped = products.double() + damping * mean * torch.eye(len(products), dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper.float()
        damping *= 10


def round_model(
    model: Decoder, texts: Sequence[Sequence[int]], group: int, dtype: torch.dtype, *, symmetric: bool
) -> dict[str, Grid]:
    """Round the matrices of a model's layers, one layer after another, calibrated on a text.

    Args:
        model: float32 on plain torch; its matrices get values on their grids.
        texts: token ids, as in ``layer_inputs``.

    Returns:
        The grid of each matrix by its name in ``weight_shapes``.

    Raises:
        ValueError: rows that are not whole groups (the message names the matrix), or a text that is too short.
    """
    check_groups(model, group)
    grids: dict[str, Grid] = {}
    for number, inputs in layer_inputs(model, texts, products=True):
        for names in _sharing(inputs):
            found = _rounded_together(model, number, names, inputs, group, dtype, symmetric)
            grids |= {f"layers.{number}.{name}.weight": grid for name, grid in found.items()}
    return grids


def check_groups(model: Decoder, group: int) -> None:
    """Check that the rows of all matrices are whole groups. Raises ValueError."""
    for name, weight in model.weights():
        if name != "head" and weight.in_features % group:
            raise ValueError(f"{name}: rows of {weight.in_features} numbers cannot be cut into groups of {group}")


def _sharing(inputs: LayerInputs) -> list[list[str]]:
    """Group the names of a layer's matrices by their input."""
    found: dict[int, list[str]] = {}
    for name, each in inputs.items():
        found.setdefault(id(each), []).append(name)
    return list(found.values())


def _rounded_together(
    model: Decoder, number: int, names: list[str], inputs: LayerInputs, group: int, dtype: torch.dtype, symmetric: bool
) -> dict[str, Grid]:
    """Round matrices with one input as one."""
    weights = [_matrix(model, f"layers.{number}.{name}") for name in names]
    each = inputs[names[0]]
    assert each.products is not None
    experts = len(each.products)
    parts = [weight.unflatten(0, (experts, -1)) for weight in weights]
    sizes = [part.shape[1] for part in parts]
    found: list[list[Grid]] = [[] for _ in names]
    for expert in range(experts):
        whole = torch.cat([part[expert] for part in parts])
        products = each.products[expert] / max(1, each.rows)
        counts = products.diagonal()
        counts = (counts / counts.mean()).clamp(min=1e-4) if bool(counts.any()) else torch.ones(len(counts))
        grid = grid_of(whole, group, counts, dtype, symmetric=symmetric)
        values = compensated(whole, products, grid)
        cut = zip(values.split(sizes), grid.scale.split(sizes), grid.zero.split(sizes), strict=True)
        for part, own, (rounded, scale, zero) in zip(parts, found, cut, strict=True):
            part[expert].copy_(rounded)
            own.append(Grid(scale, zero))
    return {name: Grid.below(grids) for name, grids in zip(names, found, strict=True)}


def _matrix(model: Decoder, name: str) -> Tensor:
    """Return the numbers of a matrix in place."""
    found = model.get_parameter(f"{name}.weight")
    return found.detach()
