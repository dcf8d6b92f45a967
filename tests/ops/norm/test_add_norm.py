"""Residual add and norm in one pass: in place, out arguments, both upstream gradients, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.norm import layer_norm
from transect.ops.norm.add_layer_norm import add_layer_norm, triton_add_layer_norm
from transect.ops.norm.add_layer_norm import triton_backward as add_layer_norm_backward
from transect.ops.norm.add_rms_norm import add_rms_norm, triton_add_rms_norm
from transect.ops.numerics import sample
from transect.ops.registry import get

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH = 5, 24
OPERATORS = [
    ("add_rms_norm", triton_add_rms_norm, add_rms_norm),
    ("add_layer_norm", triton_add_layer_norm, add_layer_norm),
]
EACH = pytest.mark.parametrize(("name", "launch", "operator"), OPERATORS, ids=[name for name, *_ in OPERATORS])


def inputs(name: str) -> list[Any]:
    vectors = (2, 3) if name == "add_layer_norm" else (2,)
    rows = [sample(ROWS, WIDTH, seed=seed).to(DEVICE) for seed in (0, 1)]
    return [*rows, *(sample(WIDTH, seed=seed).to(DEVICE) for seed in vectors), 1e-5]


@EACH
def test_in_place(name: str, launch: Callable[..., Any], operator: Callable[..., Any]) -> None:
    arguments = inputs(name)
    expected = get(name).reference(*(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))
    made = launch(*arguments, out=(arguments[0], arguments[1]))
    assert made[0] is arguments[0] and made[1] is arguments[1]
    torch.testing.assert_close(made[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(made[1], expected[1])


@EACH
def test_what_does_not_fit_is_said(name: str, launch: Callable[..., Any], operator: Callable[..., Any]) -> None:
    x, residual, *rest = inputs(name)
    with pytest.raises(ValueError, match="x and residual must have one shape and dtype"):
        launch(x, residual[:-1], *rest)
    with pytest.raises(ValueError, match="x and residual must have one shape and dtype"):
        launch(x, residual.half(), *rest)
    with pytest.raises(ValueError, match="out must be two contiguous tensors"):
        launch(x, residual, *rest, out=(x, residual.T.contiguous().T))
    wide = torch.zeros(1, 65537, device=DEVICE)
    with pytest.raises(ValueError, match="65537 elements is past 65536"):
        launch(wide, wide, *rest)


@EACH
@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_break(name: str, launch: Callable[..., Any], operator: Callable[..., Any]) -> None:
    """Gradients through both results, one of them used twice."""

    def loss(call: Callable[..., Any], arguments: list[Any]) -> torch.Tensor:
        y, total = call(*arguments)
        return (y * total).sum() + 0.5 * total.square().sum()

    found = []
    for call in (get(name).reference, operator):
        free = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in inputs(name)]
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager") if call is operator else loss
        compiled(call, free).backward()
        found.append([a.grad for a in free[:-1]])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_of_tiles_of_rows(rows: int, residual: bool, eps: float) -> None:
    """The last tile is not full, and what it lacks adds nothing, even where a variance of 0 has no inverse."""
    grad, x, up = (sample(9, WIDTH, seed=seed).to(DEVICE) for seed in (0, 1, 2))
    weight = sample(WIDTH, seed=3).to(DEVICE)
    config = {"warps": 2, "waves": 1, "stages": 3, "rows": rows}
    expected = layer_norm.reference_backward(grad, x, weight, eps)
    if residual:
        made = add_layer_norm_backward(grad, up, x, weight, eps, config=config)
        expected = (expected[0] + up, *expected[1:])
    else:
        made = layer_norm.triton_backward(grad, x, weight, eps, config=config)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
