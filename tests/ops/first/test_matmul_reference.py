"""Without a kernel (here: float64) the operator of ``matmul.py`` runs its reference, gradients included."""

import pytest
import torch
from torch.autograd import gradcheck

from transect.ops.linear.many_rows.matmul import linear_autograd, matmul_autograd


def numbers(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("activation", ["", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_are_the_numeric_ones(activation: str, with_bias: bool) -> None:
    x, weight, residual = numbers(5, 3, seed=0), numbers(4, 3, seed=1), numbers(5, 4, seed=2)
    bias = numbers(4, seed=3) if with_bias else None
    assert gradcheck(lambda *t: matmul_autograd(t[0], t[1], t[3], None, t[2], activation), (x, weight, residual, bias))


def test_gradients_of_a_gated_product_are_the_numeric_ones() -> None:
    x, weight, gate, bias = numbers(5, 3, seed=0), numbers(4, 3, seed=1), numbers(4, 3, seed=2), numbers(4, seed=3)
    assert gradcheck(lambda x, w, v, b: matmul_autograd(x, w, b, v), (x, weight, gate, bias))


def test_linear_is_the_product_with_a_bias() -> None:
    x, weight, bias = numbers(5, 3, seed=0), numbers(4, 3, seed=1), numbers(4, seed=3)
    torch.testing.assert_close(linear_autograd(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
