"""The linear layer with its adapter in C++: values and gradients against float64, and a run against torch alone."""

import pytest
import torch
from training_runs import tiny_run

from transect.models.weights.adapted import Adapted
from transect.models.weights.dense import Dense
from transect.ops.cpu.training import kernels
from transect.ops.opset import resolve_ops
from transect.ops.registry import Unavailable
from transect.train.trainer import Trainer


@pytest.fixture
def native():
    torch.set_num_threads(1)
    try:
        return kernels(2)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "inputs", "outputs", "rank"), [(1, 3, 2, 1), (37, 50, 45, 5), (64, 800, 33, 16)])
def test_values_and_gradients(native, tokens: int, inputs: int, outputs: int, rank: int, bias: bool) -> None:
    torch.manual_seed(0)
    base = Dense(outputs, inputs, bias, ops=resolve_ops()).requires_grad_(False)
    for parameter in base.parameters():
        parameter.normal_()
    layer = Adapted(base, rank, 8.0, seed=0, native=native)
    with torch.no_grad():
        layer.b.normal_()
    x, grad = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    found = x.clone().requires_grad_()
    y = layer(found)
    y.backward(grad)
    gradients = found.grad, layer.a.grad, layer.b.grad
    wide = [t.detach().double().requires_grad_() for t in (x, layer.a, layer.b)]
    exact = wide[0] @ (base.weight.double() + layer.scale * wide[2] @ wide[1]).mT
    exact = exact if base.bias is None else exact + base.bias.double()
    exact.backward(grad.double())
    for a, b in zip((y.detach(), *gradients), (exact.detach(), *(t.grad for t in wide)), strict=True):
        assert (a.double() - b).norm() <= 2e-6 * b.norm()


def test_no_gradient_is_made_for_an_input_that_wants_none(native) -> None:
    base = Dense(8, 8, ops=resolve_ops()).requires_grad_(False)
    base.weight.normal_()
    layer = Adapted(base, 2, 2.0, seed=0, native=native)
    x = torch.randn(3, 8)
    layer(x).sum().backward()
    assert x.grad is None
    assert layer.b.grad is not None


def test_a_run_is_that_of_torch_alone(native, tmp_path) -> None:
    fast, plain = (Trainer(tiny_run(tmp_path, task="lora", lora={"rank": 4})) for _ in range(2))
    adapters = [module for module in plain.model.modules() if isinstance(module, Adapted)]
    assert adapters
    for adapter in adapters:
        assert adapter.native is not None
        adapter.native = None
    for _ in range(5):
        assert fast.step().loss == pytest.approx(plain.step().loss, abs=1e-5)
