"""Every Triton implementation in the registry against float64, both directions, in the interpreter (or on the GPU)."""

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.registry import Implementation, Op, all_ops
from transect.ops.tools.accuracy import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bfloat16 off instead of rounding it, so there the 16-bit format tested is float16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
ENTRIES = [
    pytest.param(op, made, id=f"{op.name}-{label}")
    for op in all_ops()
    for label, made in op.implementations.items()
    if made.backend == "triton" and (DEVICE == "cuda" or made.load.__module__ == "transect.ops.jit")
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("op", "implementation"), ENTRIES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_error_against_float64(op: Op, implementation: Implementation, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    findings = list(check(op, implementation, dtype, DEVICE))
    assert findings
    assert [finding for finding in findings if not finding.passed] == []


@pytest.mark.parametrize(("op", "implementation"), [entry for entry in ENTRIES if entry.values[1].autograd is not None])
@pytest.mark.filterwarnings("ignore")
def test_operator_passes_opcheck(op: Op, implementation: Implementation) -> None:
    assert implementation.autograd is not None
    call = implementation.autograd()
    call = getattr(call, "operator", call)  # where the operator also returns what its gradient needs
    example = next(e for e in op.examples() if all(v.numel() for v in e.values() if isinstance(v, torch.Tensor)))
    inputs = {
        key: value.to(DEVICE).requires_grad_(key in op.differentiable) if isinstance(value, torch.Tensor) else value
        for key, value in example.items()
    }
    torch.library.opcheck(call, (), inputs, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch.library.opcheck(call, (), inputs, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("op", [op for op in all_ops() if op.differentiable], ids=lambda op: op.name)
def test_gradcheck_of_the_reference(op: Op) -> None:
    example = min(op.examples(), key=lambda e: sum(v.numel() or 1e9 for v in e.values() if isinstance(v, torch.Tensor)))
    inputs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in example.items()}
    names = [name for name in op.differentiable if isinstance(inputs.get(name), torch.Tensor)]
    free = [inputs[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(
        lambda *values: op.reference(**(inputs | dict(zip(names, values, strict=True)))), free
    )
