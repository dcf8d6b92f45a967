"""Every kernel in the registry against float64, both directions, in the interpreter (or on the GPU)."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from effort import proving
from registered import kernel_entries, marks

from transect.ops.registry import Implementation, Op, Unavailable, all_ops
from transect.ops.tools.accuracy import LAYOUTS, Comparison, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bfloat16 off instead of rounding it, so there the 16-bit format tested is float16.
DTYPES = ("float32", "bfloat16", "float16") if DEVICE == "cuda" else ("float32", "float16")
ENTRIES = [
    pytest.param(op, made, dtype, id=f"{name}-{dtype}", marks=marks(made))
    for op, made, name in kernel_entries()
    for dtype in DTYPES
    if dtype in made.dtypes
]


def loadable(implementation: Implementation) -> None:
    """Skip, with the reason, what cannot run here."""
    try:
        implementation.load()
    except Unavailable as error:
        pytest.skip(str(error))


def numbers(example: dict[str, Any]) -> int:
    """How many numbers an example has."""
    return sum(value.numel() for value in example.values() if isinstance(value, torch.Tensor))


def efforts(op: Op, dtype: str) -> list[list[dict[str, Any]]]:
    """What is checked, in parts; where a kernel takes nothing of that, what else. Everything on a GPU.

    The interpreter is slow: there strides are tried in one dtype, and small results drawn half as often. Without
    ``--prove`` one dtype gets the first example with strides and the three smallest others as they lie, with gradients
    where there are any; the second dtype gets one example; small results are drawn three times,
    single numbers as often as ever. An operator that only chooses among the kernels of others gets its smallest
    example.
    """
    if DEVICE == "cuda":
        return [[{}]]
    wide = dtype == "float32"
    strides = LAYOUTS if wide else LAYOUTS[:1]
    everything = {"draws": 8, "layouts": strides}
    if proving():
        return [[everything]]
    first, *others = op.examples()
    if op.measured_as:
        first, others = min(filter(numbers, op.examples()), key=numbers), []
    smallest = sorted(others, key=numbers)[:3] if wide else []
    draws = 8 if ".first." in op.reference.__module__ else 3
    once = {"draws": draws, "layouts": strides[1:] if smallest else strides, "examples": [first]}
    return [[once, {"draws": draws, "layouts": LAYOUTS[:1], "examples": smallest, "plain": False}], [everything]]


@pytest.mark.parametrize(("op", "implementation", "dtype"), ENTRIES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_error_against_float64(op: Op, implementation: Implementation, dtype: str) -> None:
    loadable(implementation)
    torch.set_num_threads(1)
    findings: list[Comparison] = []
    for parts in efforts(op, dtype):
        for part in parts:
            findings += check(op, implementation, getattr(torch, dtype), DEVICE, **part)
        if findings:
            break
    else:
        pytest.skip("takes none of the examples (it has shapes of its own in the GPU tests)")
    assert [finding for finding in findings if not finding.passed] == []


@pytest.mark.parametrize("op", [op for op in all_ops() if op.differentiable], ids=lambda op: op.name)
def test_gradcheck_of_the_reference(op: Op) -> None:
    example = min(op.examples(), key=lambda e: sum(v.numel() or 1e9 for v in e.values() if isinstance(v, torch.Tensor)))
    inputs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in example.items()}
    names = [name for name in op.differentiable if isinstance(inputs.get(name), torch.Tensor)]
    free = [inputs[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(
        lambda *values: op.reference(**(inputs | dict(zip(names, values, strict=True)))), free
    )
