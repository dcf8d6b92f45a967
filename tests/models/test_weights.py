"""Kinds of weight: products, the values they stand for, shards, bytes; projections and their joined storage."""

import copy
import gc
import weakref

import pytest
import torch

from transect.formats.ggml_quantize import quantize as ggml_quantize
from transect.models.decoder import Decoder
from transect.models.staging import Staging
from transect.models.stored import Codes8
from transect.models.weights import int4_serving
from transect.models.weights.adapted import Adapted
from transect.models.weights.dense import Dense
from transect.models.weights.int4 import Int4
from transect.models.weights.int4_serving import Int4Products, ServingInt4, affine_groups, rounded
from transect.models.weights.packed import Packed
from transect.models.weights.projection import Projection
from transect.models.weights.scaled8 import Scaled8
from transect.ops.cpu import library as cpu_library
from transect.ops.linear.packed.int4 import int4_matmul
from transect.ops.opset import resolve_ops
from transect.ops.registry import Unavailable
from transect.spec.model import ModelConfig
from transect.spec.numbers.int4 import INT4, int4_format
from transect.spec.numbers.layouts import ScaledLayout
from transect.spec.numbers.registry import rounding

O, I = 64, 512
CPU = Staging("cpu")


def values(seed=0, outputs=O, inputs=I):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def library():
    try:
        return cpu_library.load(1)
    except Unavailable as reason:
        pytest.skip(str(reason))


def products():
    """Torch's, whether or not Triton's interpreter is there: what is tested here is the layout."""
    return Int4Products(int4_matmul.reference, int4_serving._gated_by_torch)


def dense(bias=True):
    made = Dense(O, I, bias, ops=resolve_ops()).requires_grad_(False)
    made.load(values(), CPU)
    if bias:
        made.bias.copy_(values(1, O, 1)[:, 0])
    return made


def serving(bias=False, outputs=O, inputs=I, seed=0):
    made = ServingInt4(outputs, inputs, bias, products=products(), dtype=torch.float32)
    made.load(values(seed, outputs, inputs), CPU)
    return made


def packed(type_name=None, bias=True):
    made = Packed(O, I, bias, library=library())
    made.load(values() if type_name is None else ggml_quantize(values().numpy(), type_name), CPU)
    if bias:
        made.bias.data.copy_(values(1, O, 1)[:, 0])
    return made


def adapted():
    made = Adapted(dense(), 4, 8.0, seed=0)
    torch.nn.init.normal_(made.b, generator=torch.Generator().manual_seed(2))
    return made


def scaled8(fp8):
    made = Scaled8(O, I, True, fp8=fp8)
    made.load(values(), CPU)
    made.bias.data.copy_(values(1, O, 1)[:, 0])
    return made


KINDS = {
    "dense": dense,
    "dense without a bias": lambda: dense(False),
    "int4": lambda: Int4.of(dense(), 32),
    "int4 to serve": serving,
    "fp8": lambda: scaled8(True),
    "int8": lambda: scaled8(False),
    "packed float32": packed,
    "packed Q4_1": lambda: packed("Q4_1"),
    "packed Q8_0": lambda: packed("Q8_0"),
    "adapted": adapted,
    "adapted int4": lambda: Adapted(Int4.of(dense(), 64), 4, 8.0, seed=0),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_product_is_that_of_the_dense_values(name):
    weight = KINDS[name]()
    x = values(5, 7, I)
    expected = x @ weight.dense().T + (0 if weight.bias is None else weight.bias)
    torch.testing.assert_close(weight(x), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(weight.product()(x), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(weight.rows(torch.tensor([3, 0])), weight.dense()[[3, 0]])


@pytest.mark.parametrize("name", KINDS)
def test_shards_are_parts_of_the_whole(name):
    weight = KINDS[name]()
    x = values(5, 7, I)
    whole = weight(x)
    outputs = torch.cat([weight.shard("out", rank, 2)(x) for rank in range(2)], 1)
    torch.testing.assert_close(outputs, whole, rtol=1e-4, atol=1e-3)
    cut = [weight.shard("in", rank, 2) for rank in range(2)]
    parts = [part(half.contiguous()) for part, half in zip(cut, x.chunk(2, 1), strict=True)]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-3, atol=2e-3)
    assert sum(part.shape[1] for part in cut) == I and cut[1].bias is None
    dense_parts = torch.cat([part.dense() for part in cut], 1)
    torch.testing.assert_close(dense_parts, weight.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dim", "n", "sentence"),
    [
        ("dense", "out", 3, "64 cannot be cut into 3 equal parts"),
        ("int4", "in", 16, "512 cannot be cut into 16 equal parts of whole pairs of groups of 64"),
        ("int4 to serve", "out", 8, "64 cannot be cut into 8 equal parts of whole blocks of rows of 16"),
        ("int4 to serve", "in", 8, "512 cannot be cut into 8 equal parts of whole spans of columns of 128"),
        ("packed Q4_1", "in", 32, "512 cannot be cut into 32 equal parts of whole panels of columns of 32"),
    ],
)
def test_what_cannot_be_cut_is_refused(name, dim, n, sentence):
    with pytest.raises(ValueError, match=sentence):
        KINDS[name]().shard(dim, 0, n)
    with pytest.raises(ValueError, match="there is no rank 2 of 2"):
        KINDS[name]().shard(dim, 2, 2)


def test_bytes_and_costs_are_those_of_the_format():
    bits = {name: make().format.bits for name, make in KINDS.items()}
    assert bits["dense"] == 32 and bits["packed float32"] == 32
    assert bits["int4"] == 4 + 2 * 32 / 32 and bits["int4 to serve"] == int4_format().bits == 4.25
    assert bits["packed Q4_1"] == 5
    assert bits["adapted"] == 32 + 32 * 4 * (O + I) / (O * I)
    for name, make in KINDS.items():
        weight = make()
        assert weight.nbytes == weight.format.bits * O * I / 8, name
        cost = weight.cost(3)
        bias = 0 if weight.bias is None else 4 * O
        assert cost.bytes_read == weight.nbytes + 2 * 3 * I + bias
        assert cost.bytes_written == 2 * 3 * O


@pytest.mark.parametrize("inputs", [256, 576])
def test_served_in_4_bits_means_the_same_numbers_everywhere(inputs):
    """On a GPU, where rows are filled up to whole groups, on the C++ kernels and on plain torch."""
    weight = values(0, 32, inputs) / 10
    gpu = ServingInt4(32, inputs, products=products(), dtype=torch.float32)
    gpu.load(weight, CPU)
    assert torch.equal(gpu.dense(), rounded(weight))
    cpu = Packed(32, inputs, library=library(), rounding=INT4)
    cpu.load(weight, CPU)
    torch.testing.assert_close(cpu.dense(), gpu.dense(), rtol=1e-6, atol=0)
    assert cpu.format.name == "Q4_HALF"
    x = values(1, 5, inputs)
    torch.testing.assert_close(gpu(x), x @ rounded(weight).T, rtol=1e-4, atol=1e-4)
    step = (weight.amax(1) - weight.amin(1)).max() / 15
    assert (rounded(weight) - weight).abs().max() <= 0.51 * step
    with pytest.raises(ValueError, match="whose length is a multiple of 32, not 20"):
        affine_groups(weight[:, :20])


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_rounded_to_8_bits_on_the_c_kernels_as_on_torch(name):
    """A scale for each row; and of fp8 codes of a checkpoint with scales of blocks."""
    weight, x = values(0, 40, 160) / 10, values(1, 5, 160)
    torch_ = Scaled8(40, 160, fp8=name == "fp8", dtype=torch.float32)
    torch_.load(weight, CPU)
    cpu = Packed(40, 160, library=library(), rounding=rounding(name))
    cpu.load(weight, CPU)
    assert cpu.format.name == {"fp8": "FP8", "int8": "Q8_FLOAT"}[name]
    torch.testing.assert_close(cpu.dense(), torch_.dense(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(cpu(x), torch_(x), rtol=1e-4, atol=1e-4)
    if name == "fp8":
        codes = Codes8(ScaledLayout(fp8=True, blocks=True), torch_.codes, values(2, 1, 2).abs())
        cpu = Packed(40, 160, library=library())
        assert cpu.takes(codes.layout)
        cpu.load(codes, CPU)
        wide = codes.scale.repeat_interleave(128, 1)[:, :160]
        torch.testing.assert_close(cpu.dense(), torch_.codes.view(torch.float8_e4m3fn).float() * wide)


CONFIG = ModelConfig("llama", 61, 256, 2, 4, 2, 16, 128, 64, qkv_bias=True)


def parts(projection):
    return [part.dense() for part in projection.matrices]


def test_joined_parts_are_views_of_one_storage():
    model = Decoder(CONFIG).init_weights(0.3, torch.Generator().manual_seed(0))
    qkv = model.layers[0].attention.qkv
    before, held = [p.detach().clone() for p in parts(qkv)], [part.weight for part in qkv.matrices]
    whole = qkv.join()
    assert qkv.join() is whole
    assert whole.shape == (64 + 32 + 32, 256) == qkv.shape
    for part, same, old in zip(qkv.matrices, held, before, strict=True):
        assert part.weight is same and part.weight.requires_grad  # an optimizer holds it
        assert torch.equal(part.weight, old)
    with torch.no_grad():
        held[1].fill_(3.0)
        qkv.parts["v"].bias.fill_(2.0)
    assert (whole.dense()[64:96] == 3).all() and (whole.bias[96:] == 2).all()
    x = values(0, 3, 256)
    with torch.no_grad():
        torch.testing.assert_close(qkv.product()(x), torch.cat(qkv.apart(x), 1))
        torch.testing.assert_close(qkv(x), qkv.product()(x))


def test_what_moves_or_changes_its_type_stays_joined():
    model = Decoder(CONFIG, "meta")
    model.join()
    model = model.to_empty(device="cpu").init_weights(0.3, torch.Generator().manual_seed(0)).requires_grad_(False)
    model = model.to(torch.float64)
    qkv = model.layers[1].attention.qkv
    before = qkv.dense().clone()
    x = values(0, 3, 256).double()
    product = qkv.product()
    torch.testing.assert_close(product(x), x @ before.T + qkv.bias)
    qkv.parts["k"].weight.zero_()
    assert (product(x)[:, 64:96] == qkv.parts["k"].bias).all()
    twin = copy.deepcopy(model)
    twin.layers[1].attention.k.weight.fill_(1.0)
    assert (twin.layers[1].attention.qkv.apart(x)[1] != qkv.apart(x)[1]).any()


def test_a_part_is_replaced_under_its_name():
    model = Decoder(CONFIG).init_weights().requires_grad_(False)
    names = set(model.state_dict())
    attention = model.layers[0].attention
    attention.qkv.join()
    attention.k = Adapted(attention.k, 2, 4.0, seed=0)
    assert attention.qkv.parts["k"] is attention.k and attention.qkv.join() is None
    torch.nn.init.ones_(attention.k.b)
    x = values(0, 3, 256)
    torch.testing.assert_close(attention.qkv.product()(x), torch.cat(attention.qkv.apart(x), 1))
    assert attention.qkv.gated_product() is None
    added = set(model.state_dict()) - names
    assert added == {f"layers.0.attention.k.{name}" for name in ("a", "b", "base.weight", "base.bias")}
    assert attention.qkv.format.name == "dense 32-bit and dense 32-bit with an adapter"


def test_parts_in_4_bits_are_joined_where_their_rows_come_in_blocks():
    gate, up = serving(seed=1), serving(seed=2)
    both = Projection(gate=gate, up=up)
    before = both.dense()
    joined = both.join()
    assert joined.arranged.is_contiguous() and gate.arranged.data_ptr() == joined.arranged.data_ptr()
    assert torch.equal(both.dense(), before) and torch.equal(joined.dense(), before)
    assert both.nbytes == joined.nbytes
    x = values(0, 3, I)
    torch.testing.assert_close(both.product()(x), x @ before.T, rtol=1e-4, atol=1e-4)
    expected = torch.nn.functional.silu(x @ before[:O].T) * (x @ before[O:].T)
    torch.testing.assert_close(both.gated_product()(x), expected, rtol=1e-4, atol=1e-3)
    gate.load(values(7), CPU)
    torch.testing.assert_close(joined.dense()[:O], rounded(values(7)))
    odd = Projection(q=serving(outputs=24), k=serving(outputs=16))
    assert odd.join() is None
    torch.testing.assert_close(odd.product()(x), x @ odd.dense().T, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_dropped_is_gone_at_once():
    """Projections and their owners must not hold each other: gigabytes would stay until the garbage collector comes."""
    gc.disable()
    try:
        model = Decoder(CONFIG)
        layer = model.layers[0]
        model.stack = None
        model.join()
        there = weakref.ref(layer)
        del layer, model
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("fp8", "most"), [(True, 1 / 16), (False, 1 / 127)])
def test_eight_bits_are_near(fp8, most):
    """fp8 is off by at most a sixteenth of a number, int8 by half a step of its row; joined they stay so."""
    weight, exact = scaled8(fp8), values()
    error = (weight.dense() - exact).abs()
    size = exact.abs() if fp8 else exact.abs().amax(1, keepdim=True)
    assert bool((error <= most * size + (2e-3 if fp8 else 1e-6) * exact.abs().amax(1, keepdim=True)).all())
    other = scaled8(fp8)
    joined = weight.join_with([other])
    assert torch.equal(joined.dense(), torch.cat([weight.dense(), other.dense()]))
    assert weight.codes.data_ptr() == joined.codes.data_ptr()
    assert weight.join_with([scaled8(not fp8)]) is None
