"""What the decoder's operators declare: gradients of the references, agreement of all ways to compute, costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from transect.ops.opset import OPERATORS
from transect.ops.registry import get

EXAMPLES = [(name, index) for name in OPERATORS for index in range(len(get(name).examples()))]
DIFFERENTIABLE = [(name, index) for name, index in EXAMPLES if get(name).differentiable]


def example(name: str, index: int, dtype: torch.dtype) -> dict[str, Any]:
    arguments: Mapping[str, Any] = get(name).examples()[index]
    kept = () if dtype == torch.float64 else get(name).keeps_dtype
    return {key: value.to(dtype) if floating(value) and key not in kept else value for key, value in arguments.items()}


def floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def outputs(name: str, function: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Results, or for an operator that writes in place what it wrote."""
    mutated = get(name).mutates
    arguments = {key: value.clone() if key in mutated else value for key, value in arguments.items()}
    result = function(**arguments)
    returned = () if result is None else result if isinstance(result, tuple) else (result,)
    return (*(arguments[key] for key in mutated), *returned)


@pytest.mark.parametrize(("name", "index"), DIFFERENTIABLE)
def test_reference_gradient(name: str, index: int) -> None:
    arguments = example(name, index, torch.float64)
    keys = [key for key in get(name).differentiable if arguments[key] is not None]
    inputs = [arguments[key].requires_grad_(True) for key in keys]
    reference = get(name).reference
    assert torch.autograd.gradcheck(
        lambda *values: reference(**arguments | dict(zip(keys, values, strict=True))), inputs, fast_mode=True
    )


@pytest.mark.parametrize(("name", "index"), EXAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_implementations_and_peers(name: str, index: int, dtype: torch.dtype) -> None:
    """Each against the reference in float64: no further off than 2x the reference itself in this dtype, or an ulp."""
    op = get(name)
    arguments = example(name, index, dtype)
    exact = outputs(name, op.reference, example(name, index, dtype) | upcast(arguments))
    plain = outputs(name, op.reference, arguments)
    others = {label: way.load() for label, way in op.implementations.items() if way.backend == "torch"}
    assert others
    if "torch" in op.peers:
        others["peer torch"] = op.peers["torch"]
    for label, function in others.items():
        for ours, theirs, right in zip(outputs(name, function, arguments), plain, exact, strict=True):
            assert ours.dtype in (dtype, theirs.dtype) and ours.shape == right.shape
            if not floating(ours):
                assert torch.equal(ours, right)
                continue
            if not right.numel():
                continue
            rounding = 4 * torch.finfo(dtype).eps * right.abs().max()
            assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + rounding, label


def upcast(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same values in float64."""
    return {
        key: value.double()
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


@pytest.mark.parametrize(("name", "index"), EXAMPLES)
def test_cost(name: str, index: int) -> None:
    """Half the element size, half the bytes (but for float32 side inputs and whole numbers), the same FLOPs; all of the
    outputs written."""
    op = get(name)
    arguments, halved = example(name, index, torch.float32), example(name, index, torch.bfloat16)
    cost, half = op.cost(**arguments), op.cost(**halved)
    assert cost.flops == half.flops
    sides = [v for k, v in arguments.items() if isinstance(v, torch.Tensor)]
    kept = sum(v.nbytes for v in sides if not v.is_floating_point()) + sum(
        arguments[key].nbytes for key in op.keeps_dtype if arguments[key] is not None
    )
    assert -1e-6 <= 2 * half.bytes_read - cost.bytes_read <= kept + 1e-6
    if op.mutates:
        assert cost.bytes_written == 2 * half.bytes_written
        return
    for each, inputs in ((cost, arguments), (half, halved)):
        assert each.bytes_written == sum(result.nbytes for result in outputs(name, op.reference, inputs))


@pytest.mark.parametrize(("name", "index"), [(name, index) for name, index in EXAMPLES if not get(name).mutates])
def test_strided_inputs(name: str, index: int) -> None:
    """Inputs that are views with gaps give what contiguous ones give."""
    arguments = example(name, index, torch.float32)
    strided = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            strided[key] = torch.stack((value, torch.full_like(value, torch.nan)), dim=-1)[..., 0]
            assert value.numel() <= 1 or not strided[key].is_contiguous()
    for label, way in get(name).implementations.items():
        if way.backend == "torch":
            for ours, right in zip(
                outputs(name, way.load(), strided), outputs(name, get(name).reference, arguments), strict=True
            ):
                torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-4, msg=label)
