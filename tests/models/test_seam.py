"""Every stack asks projections for their products and looks at nothing behind them.

The weights here are of a kind that no stack knows: it can do what every kind must, a product and its dense values, and
whoever reads its ``weight`` fails. A decoder of them gives what a decoder of dense weights gives, through every stack.
"""

import dataclasses

import pytest
import torch

from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.native import NativeStack
from transect.models.weights.adapted import Adapted
from transect.models.weights.weight import Weight
from transect.ops.cpu import library as cpu_library
from transect.ops.lang.jit import INTERPRETED
from transect.ops.opset import OPERATORS, resolve_ops, with_dependent_launch
from transect.ops.registry import Unavailable, get
from transect.spec.model import ModelConfig
from transect.train.model.activations import stack_with
from transect.train.model.merged_layers import MergedLayers

BLOCK = 16
CONFIG = ModelConfig(
    architecture="llama", vocab_size=61, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48,
    max_position=64,
)  # fmt: skip
BIASED = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True)
needs_kernels = pytest.mark.skipif(
    not INTERPRETED, reason="Triton's interpreter is chosen before its import, on machines without a GPU"
)


class Foreign(Weight):
    """A matrix as the difference of two that are not negative, by columns."""

    def __init__(self, out_features, in_features, bias=False, *, ops=None, device=None, dtype=None):
        super().__init__(out_features, in_features)
        for name in ("more", "less"):
            self.register_buffer(name, torch.zeros(in_features, out_features, dtype=dtype))
        self.add_bias(bias, device, dtype)

    @property
    def weight(self):
        raise AssertionError("a stack reads what is behind the projection")

    def forward(self, x_TI):
        out = x_TI @ self.more - x_TI @ self.less
        return out if self.bias is None else out + self.bias

    def dense(self):
        return (self.more - self.less).T


def foreign(plain, ops=None, kinds=None):
    """A decoder of foreign weights with the values of a dense one."""
    made = Decoder(plain.config, dtype=torch.float32, ops=ops or plain.ops, kinds=kinds or (lambda name: Foreign))
    own = dict(made.weights())
    with torch.no_grad():
        for name, weight in plain.weights():
            if isinstance(own[name], Foreign):
                own[name].more.copy_(weight.dense().T.clamp(min=0))
                own[name].less.copy_(-weight.dense().T.clamp(max=0))
            else:
                own[name].weight.copy_(weight.dense())
            if weight.bias is not None:
                own[name].bias.copy_(weight.bias)
        state = made.state_dict()
        for name, tensor in plain.state_dict().items():
            if "norm" in name or name.startswith("embed"):
                state[name].copy_(tensor)
    return made


def dense(config=CONFIG, ops=None):
    model = Decoder(config, dtype=torch.float32, ops=ops or resolve_ops("cpu"))
    model.init_weights(0.3, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 5
    return model


def paged(model, new=(1, 3, 7, 1), lengths=(9, 3, 20, 1)):
    columns = -(-max(lengths) // BLOCK)
    caches = model.new_kv_cache(len(lengths) * columns, BLOCK, torch.float32)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))  # in whatever order they lie
    tables = torch.arange(len(lengths) * columns, dtype=torch.int32).view(-1, columns)
    starts = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    return PagedContext(*caches, tables, starts, torch.tensor(lengths, dtype=torch.int32), model.ops)


@torch.no_grad()
def logits(model, context):
    positions = context.positions()
    return model.logits(model(torch.arange(len(positions)) % 61, positions, context))


def triton_ops():
    kernels = {name: get(name).implementations.get("triton") for name in OPERATORS}
    loaded = {name: kernel.load() for name, kernel in kernels.items() if kernel is not None}
    return with_dependent_launch(dataclasses.replace(resolve_ops("cpu"), **loaded), False)


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["plain", "biased"])
def test_layer_by_layer_and_fused(config):
    plain = dense(config)
    model = foreign(plain)
    context = VarlenContext(torch.tensor([0, 5, 8], dtype=torch.int32), model.ops)
    torch.testing.assert_close(logits(model, context), logits(plain, context), rtol=1e-4, atol=1e-4)
    expected = logits(plain, paged(plain))
    torch.testing.assert_close(logits(model, paged(model)), expected, rtol=1e-4, atol=1e-4)
    model.stack = FusedStack(model, max_positions=64)
    torch.testing.assert_close(logits(model, paged(model)), expected, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_fused_on_the_triton_kernels():
    plain = dense()
    model = foreign(plain, triton_ops())
    model.stack = FusedStack(model, max_positions=64)
    torch.testing.assert_close(logits(model, paged(model)), logits(plain, paged(plain)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["plain", "biased"])
def test_on_the_cpp_kernels(config):
    try:
        library = cpu_library.load(1)
    except Unavailable as reason:
        pytest.skip(str(reason))
    plain = dense(config)
    expected = logits(plain, paged(plain))
    model = foreign(plain).requires_grad_(False)
    model.stack = NativeStack(model, library, torch.float32, BLOCK)
    torch.testing.assert_close(logits(model, paged(model)), expected, rtol=1e-4, atol=1e-4)


def test_gpt2_has_no_gate():
    config = dataclasses.replace(
        BIASED, architecture="gpt2", norm="layernorm", activation="gelu_tanh", gated_mlp=False, position="learned",
        n_kv_heads=4, tied_embeddings=True,
    )  # fmt: skip
    plain = dense(config)
    model = foreign(plain)
    model.position_embed.weight = plain.position_embed.weight
    assert not model.head_tied and model.layers[0].mlp.gate_up.names == ("up",)
    torch.testing.assert_close(logits(model, paged(model)), logits(plain, paged(plain)), rtol=1e-4, atol=1e-4)


def gradients(model):
    """The gradients of what a model of foreign weights trains: norms and the embedding."""
    context = VarlenContext(torch.tensor([0, 5, 12], dtype=torch.int32), model.ops)
    hidden = model(torch.arange(12), context.positions(), context)
    hidden.square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if "norm" in name or name == "embed.weight"}
    return hidden.detach(), wanted


def assert_same_gradients(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-3)
    for name, gradient in expected[1].items():
        atol = 1e-4 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("plan", ["none", "selective", "full"])
def test_training_layer_by_layer(plan):
    plain = dense()
    model = foreign(plain)
    model.stack = stack_with(model, plan)
    assert_same_gradients(gradients(model), gradients(plain))


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("plan", ["none", "full"])
def test_merged_training_layers(plan):
    torch.set_num_threads(1)
    plain = dense()
    model = foreign(plain)
    model.stack = MergedLayers(model, plan)
    assert_same_gradients(gradients(model), gradients(plain))


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kinds_may_differ_from_part_to_part():
    """q dense, k foreign, v foreign with an adapter: layer by layer, fused, on the C++ kernels, and trained."""
    torch.set_num_threads(1)
    plain = dense().requires_grad_(False)
    expected = []
    for model in (plain, foreign(plain, kinds=lambda name: type(plain.head) if name.endswith(".q") else Foreign)):
        model.requires_grad_(False)
        v = model.layers[1].attention.v
        model.replace("layers.1.attention.v", Adapted(v, 2, 4.0, seed=3))
        torch.nn.init.normal_(model.layers[1].attention.v.b, generator=torch.Generator().manual_seed(3))
        model.norm.requires_grad_(True)
        found = [logits(model, paged(model))]
        for stack in (model.run_layers, FusedStack(model, max_positions=64), MergedLayers(model, "none")):
            model.stack = stack
            found.append(logits(model, paged(model)))
            adapter = model.layers[1].attention.v
            adapter.a.grad = adapter.b.grad = None
            context = VarlenContext(torch.tensor([0, 5, 12], dtype=torch.int32), model.ops)
            model(torch.arange(12), context.positions(), context).square().sum().backward()
            found += [adapter.a.grad.clone(), adapter.b.grad.clone()]
        expected.append(found)
    for one, two in zip(*expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


@needs_kernels
def test_a_trained_weight_without_a_part_in_merged_layers_is_refused():
    model = foreign(dense())
    weight = model.layers[0].attention.k
    weight.more = torch.nn.Parameter(weight._buffers.pop("more"))
    with pytest.raises(ValueError, match="brings no gradient of more to merged layers: train with merged = false"):
        MergedLayers(model, "none")


def test_what_every_kind_knows_has_a_default():
    weight = foreign(dense()).layers[0].mlp.up
    assert weight.shape == (48, 32) and weight.nbytes == 2 * 4 * 48 * 32
    assert weight.format.name == "Foreign" and weight.format.bits == 64
    cost = weight.cost(3, activation=32)
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (
        2 * 3 * 48 * 32,
        weight.nbytes + 3 * 32 * 4,
        3 * 48 * 4,
    )
    assert torch.equal(weight.rows(torch.tensor([4, 1])), weight.dense()[[4, 1]])
    with pytest.raises(ValueError, match=r"Foreign \[48, 32\] cannot be cut into shards"):
        weight.shard("out", 0, 2)
    with pytest.raises(ValueError, match="Foreign is not filled from files"):
        weight.load(torch.zeros(48, 32), None)
