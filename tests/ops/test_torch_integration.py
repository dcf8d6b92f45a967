"""Every operator with gradients inside PyTorch: opcheck, torch.compile in one graph; on a GPU also CUDA graphs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from effort import proving
from registered import kernel_entries, marks

from transect.ops.registry import Implementation, Op, Unavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENTRIES = [pytest.param(op, made, id=name, marks=marks(made)) for op, made, name in kernel_entries()]
WITH_GRADIENT = [entry for entry in ENTRIES if entry.values[1].autograd is not None]


def usable(implementation: Implementation) -> Callable[..., Any]:
    """The operator with gradients, or a skip with the reason."""
    try:
        implementation.load()
        assert implementation.autograd is not None
        return implementation.autograd()
    except Unavailable as error:
        pytest.skip(str(error))


def example_of(op: Op, made: Implementation, which: int = 0, wanted: str = "float32") -> dict[str, Any]:
    """A non-empty example that the implementation takes, on the device, in the dtype wanted or one that it takes."""
    dtype = getattr(torch, wanted if wanted in made.dtypes else made.dtypes[0])

    def place(key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.to(DEVICE, value.dtype if key in op.keeps_dtype else dtype)
            return value.detach().clone().requires_grad_(key in op.differentiable)
        return value.to(DEVICE) if hasattr(value, "to") else value

    found = []
    for example in op.examples():
        placed = {key: place(key, value) for key, value in example.items()}
        filled = all(v.numel() for v in example.values() if isinstance(v, torch.Tensor))
        if filled and not (made.refusal and made.refusal(**placed)):
            found.append(placed)
    if len(found) <= which:
        pytest.skip("takes none of the examples")
    return found[which]


def random_like(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Upstream gradients, always the same."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    return [torch.randn(o.shape, generator=generator, device=DEVICE).to(o.dtype) for o in outputs]


def gradients(
    call: Callable[..., Any], op: Op, inputs: Mapping[str, Any], upstream: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Outputs, and gradients (where there are any) for fixed random upstream gradients."""
    made = call(**inputs)
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    upstream = random_like(outputs) if upstream is None else upstream
    wanted = [inputs[key] for key in op.differentiable if isinstance(inputs.get(key), torch.Tensor)]
    if not wanted:
        return outputs
    reached = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
    return [*outputs, *torch.autograd.grad([o for o, _ in reached], wanted, [g for _, g in reached])]


@pytest.mark.parametrize(("op", "implementation"), WITH_GRADIENT)
@pytest.mark.filterwarnings("ignore")
def test_opcheck(op: Op, implementation: Implementation) -> None:
    call = usable(implementation)
    call = getattr(call, "operator", call)  # where the operator also returns what its gradient needs
    if not isinstance(call, torch._library.custom_ops.CustomOpDef):
        pytest.skip("calls another operator, which is checked where it is defined")
    inputs = example_of(op, implementation)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(call, (), inputs, test_utils=tests)
    half = example_of(op, implementation, wanted="bfloat16")  # results of a fixed dtype are found out
    torch.library.opcheck(call, (), half, test_utils="test_faketensor")
    if proving():  # like the next test, with sizes that may change
        torch.library.opcheck(call, (), inputs, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize(("op", "implementation"), WITH_GRADIENT)
@pytest.mark.filterwarnings("ignore")
def test_compiles_into_one_graph(op: Op, implementation: Implementation) -> None:
    """``fullgraph=True`` raises at a graph break; outputs and gradients are those of the eager run."""
    call = usable(implementation)
    inputs = example_of(op, implementation)
    names = list(inputs)

    def step(*values: Any) -> Any:
        return call(**dict(zip(names, values, strict=True)))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = gradients(call, op, inputs)
    found = gradients(lambda **given: compiled(*given.values()), op, inputs)
    assert len(found) == len(expected)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("op", "implementation"), ENTRIES)
def test_captured_in_a_cuda_graph(op: Op, implementation: Implementation, direction: str) -> None:
    """A replay on new values in the same tensors gives what an eager run on those values gives, to the bit."""
    if direction == "backward" and implementation.autograd is None:
        pytest.skip("has no gradient")
    try:
        call = implementation.load() if direction == "forward" else usable(implementation)
    except Unavailable as error:
        pytest.skip(str(error))
    inputs = example_of(op, implementation)
    if op.mutates:
        pytest.skip("writes in place; its own test captures it")

    def run() -> list[torch.Tensor]:
        if direction == "backward":
            return gradients(call, op, inputs, upstream)
        with torch.no_grad():
            made = call(**inputs)
        return [made] if isinstance(made, torch.Tensor) else list(made)

    made = call(**inputs)
    upstream = random_like([made] if isinstance(made, torch.Tensor) else list(made))
    del made
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            captured = run()
    torch.cuda.synchronize()
    with torch.no_grad():
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and key not in op.keeps_dtype:
                value.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    expected = run()
    for ours, eager in zip(captured, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
