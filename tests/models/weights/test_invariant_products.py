"""Products in few bits whose rows do not depend on each other: equal bits for any number of rows, and near the exact
product."""

import pytest
import torch

from transect.models.staging import Staging
from transect.models.weights.kinds import kinds_for
from transect.ops.opset import resolve_ops
from transect.spec.numbers.gguf import UNITS
from transect.spec.numbers.layouts import BlockLayout, GroupLayout, ScaledLayout

ROWS = (1, 2, 5, 17)


def weight_in(form, device, outputs, inputs, bias=False, dtype=torch.bfloat16):
    kind = kinds_for(form, device, dependent_launch=device == "cuda", batch_invariant=True)("attention.q")
    weight = kind(outputs, inputs, bias, ops=resolve_ops(device), device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    weight.load(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, Staging(device))
    if bias:
        weight.bias.data.copy_(torch.randn(outputs, generator=generator))
    return weight.requires_grad_(False)


def assert_rows_are_independent(call, x, rows, expected, within):
    found = call(x)
    assert (found.double() - expected).norm() <= within * expected.norm()
    for count in rows:
        assert torch.equal(call(x[:count].contiguous()), found[:count]), f"{count} of {len(x)} rows"
    assert torch.equal(call(x[3:4].contiguous()), found[3:4]), "a row alone"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["int4", "fp8", "int8"])
def test_rows_are_independent(form, bias):
    weight = weight_in(form, "cpu", 48, 256, bias)
    assert weight.batch_invariant
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ weight.dense().double().T + (0 if weight.bias is None else weight.bias.double())
    assert_rows_are_independent(weight.product(), x, ROWS, exact, 0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (4608, 3584)])
@pytest.mark.parametrize("form", ["int4", "fp8", "int8"])
def test_rows_are_independent_on_a_gpu(form, shape):
    """Numbers of rows on both sides of every kernel's limit, with and without a gate."""
    x = torch.randn(1100, shape[1], device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    rows = (1, 2, 9, 16, 17, 33, 64, 65, 128, 129, 200, 256, 257, 512, 513, 1024)
    within = 0.01 if form == "int4" else 0.05  # the others round x to 8 bits
    for bias in (False, True):
        weight = weight_in(form, "cuda", *shape, bias)
        exact = x.double() @ weight.dense().double().T + (0 if weight.bias is None else weight.bias.double())
        assert_rows_are_independent(weight.product(), x, rows, exact, within)
    gate, up = (weight_in(form, "cuda", *shape) for _ in range(2))
    gated = gate.join_with([up], gated=True).gated_product()
    half = x.double() @ weight_in(form, "cuda", *shape).dense().double().T
    assert_rows_are_independent(gated, x, rows, torch.nn.functional.silu(half) * half, 3 * within)


def test_layouts_that_have_such_products():
    assert GroupLayout(64).batch_invariant and ScaledLayout(True, blocks=True).batch_invariant
    assert not BlockLayout(next(iter(UNITS.values()))).batch_invariant
    assert not ScaledLayout(True, rounds_inputs=False).batch_invariant
