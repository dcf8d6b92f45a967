"""The linear layer with its adapter in C++: values and gradients against float64, and a run against torch alone."""

import pytest
import torch
from training_runs import tiny_run

from transect.models.weights.adapted import Adapted
from transect.models.weights.dense import Dense
from transect.models.weights.dropout import Dropout, Moment
from transect.models.weights.int4 import Int4
from transect.models.weights.nf4 import NF4
from transect.models.weights.weight import Weight
from transect.ops.cpu.training import kernels
from transect.ops.opset import resolve_ops
from transect.ops.registry import Unavailable
from transect.train.loop.trainer import Trainer


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


@pytest.mark.parametrize("base", ["dense", "int4", "nf4"])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_every_kind_has_the_gradients_of_its_formula(kind: str, base: str) -> None:
    torch.manual_seed(0)
    weight: Weight = Dense.over(torch.randn(24, 128), torch.randn(24), resolve_ops())
    if base != "dense":
        weight = Int4.of(weight, 64) if base == "int4" else NF4.of(weight)
    layer = Adapted(weight, 4, 6.0, seed=0, rank_stabilized=kind == "rslora", dora=kind == "dora")
    assert layer.scale == (3.0 if kind == "rslora" else 1.5)
    x, grad = torch.randn(9, 128, requires_grad=True), torch.randn(9, 24)
    torch.testing.assert_close(layer(x), weight(x))  # at the start it is the base
    with torch.no_grad():
        layer.b.normal_()
    (layer(x) * grad).sum().backward()
    wide = {name: p.detach().double().requires_grad_() for name, p in (*layer.named_parameters(), ("x", x))}
    moved = weight.dense().detach().double() + layer.scale * wide["b"] @ wide["a"]
    if kind == "dora":
        moved = moved * (wide["m"] / moved.norm(dim=1).detach())[:, None]
    exact = wide["x"] @ moved.mT + layer.bias.double()
    (exact * grad).sum().backward()
    torch.testing.assert_close(layer(x).double(), exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(x @ layer.dense().mT + layer.bias, layer(x), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(layer.product()(x.detach()), layer(x).detach())
    for name in ("a", "b", *(("m",) if kind == "dora" else ())):
        torch.testing.assert_close(getattr(layer, name).grad.double(), wide[name].grad, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(x.grad.double(), wide["x"].grad, atol=1e-3, rtol=1e-4)


def test_shards_add_up_and_dora_is_cut_between_outputs_alone() -> None:
    torch.manual_seed(0)
    layer = Adapted(Dense.over(torch.randn(24, 128), None, resolve_ops()), 4, 6.0, seed=0, dora=True)
    with torch.no_grad():
        layer.b.normal_()
    x = torch.randn(3, 128)
    halves = [layer.shard("out", rank, 2)(x) for rank in range(2)]
    torch.testing.assert_close(torch.cat(halves, 1), layer(x))
    with pytest.raises(ValueError, match="DoRA needs the norms of whole rows"):
        layer.shard("in", 0, 2)


def test_dropout_takes_no_part_without_a_gradient() -> None:
    layer = Adapted(
        Dense.over(torch.randn(8, 64), None, resolve_ops()), 4, 8.0, seed=0, dropout=Dropout(0.5, 1, Moment(3, 0))
    )
    with torch.no_grad():
        layer.b.normal_()
        plain = layer(torch.ones(2, 64))
    assert (layer(torch.ones(2, 64)) - plain).abs().max() > 1e-3
    many = [Dropout(0.25, 1, Moment(step))(torch.ones(200, 64)) for step in range(3)]
    assert not torch.equal(many[0], many[1]) and float(torch.stack(many).mean()) == pytest.approx(1, abs=0.02)
    assert "dropout" in str(layer.refuses_merging())


def test_ranks_that_share_tokens_drop_others() -> None:
    """Each has a slice of the tokens, and one mask for all slices would tie their errors together."""
    one, first, second = (Dropout(0.5, 1, moment)(torch.ones(20, 64)) for moment in (Moment(), *map(at_slice, (0, 1))))
    assert torch.equal(one, first) and not torch.equal(first, second)


def at_slice(number: int) -> Moment:
    return Moment(slice=number)
