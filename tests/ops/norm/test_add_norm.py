"""Residual add and norm in one pass: in place, out arguments, both upstream gradients, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.norm import layer_norm
from transect.ops.norm.add_rms_norm import add_rms_norm, reference, triton_add_rms_norm
from transect.ops.numerics import sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH = 5, 24


def inputs() -> list[Any]:
    rows = [sample(ROWS, WIDTH, seed=seed).to(DEVICE) for seed in (0, 1)]
    return [*rows, sample(WIDTH, seed=2).to(DEVICE), 1e-5]


def test_in_place() -> None:
    arguments = inputs()
    expected = reference(*(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))
    made = triton_add_rms_norm(*arguments, out=(arguments[0], arguments[1]))
    assert made[0] is arguments[0] and made[1] is arguments[1]
    torch.testing.assert_close(made[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(made[1], expected[1])


def test_what_does_not_fit_is_said() -> None:
    x, residual, *rest = inputs()
    with pytest.raises(ValueError, match="x and residual must have one shape and dtype"):
        triton_add_rms_norm(x, residual[:-1], *rest)
    with pytest.raises(ValueError, match="x and residual must have one shape and dtype"):
        triton_add_rms_norm(x, residual.half(), *rest)
    with pytest.raises(ValueError, match="out must be two contiguous tensors"):
        triton_add_rms_norm(x, residual, *rest, out=(x, residual.T.contiguous().T))
    wide = torch.zeros(1, 65537, device=DEVICE)
    with pytest.raises(ValueError, match="65537 elements is past 65536"):
        triton_add_rms_norm(wide, wide, *rest)


@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_break() -> None:
    """Gradients through both results, one of them used twice."""

    def loss(call: Callable[..., Any], arguments: list[Any]) -> torch.Tensor:
        y, total = call(*arguments)
        return (y * total).sum() + 0.5 * total.square().sum()

    found = []
    for call in (reference, add_rms_norm):
        free = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in inputs()]
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager") if call is add_rms_norm else loss
        compiled(call, free).backward()
        found.append([a.grad for a in free[:-1]])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_of_tiles_of_rows(rows: int, eps: float) -> None:
    """The last tile of LayerNorm is not full, and what it lacks adds nothing, even where a variance of 0 has no
    inverse."""
    grad, x = (sample(9, WIDTH, seed=seed).to(DEVICE) for seed in (0, 1))
    weight = sample(WIDTH, seed=3).to(DEVICE)
    config = {"warps": 2, "waves": 1, "stages": 3, "rows": rows}
    expected = layer_norm.reference_backward(grad, x, weight, eps)
    made = layer_norm.triton_backward(grad, x, weight, eps, config=config)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
