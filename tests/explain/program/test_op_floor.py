"""The least work of one operator, from what a trace says of its inputs."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from transect.costs.ceilings import Ceilings
from transect.costs.presets import preset
from transect.explain.program.explain import Explain
from transect.explain.program.op_floor import cost, dtype_of, floor
from transect.explain.program.trace import Key
from transect.explain.program.trace_file import read_trace

HALF, FP8, LONG = "c10::bfloat16", "c10::float8_e4m3fn", "long int"
LISTS = ("", "", "", "[16]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
GRADIENT, IMAGE, KERNEL = [2, 16, 32, 32], [2, 8, 32, 32], [16, 8, 3, 3]
LIMITS = Ceilings("slow", 1e9, 1e9, {"float32": 1e12}, update_bytes_per_second=2e9)
PRODUCT = 2.0 * 2 * 16 * 32 * 32 * 8 * 9


def keyed(name, shapes, kinds, values=()):
    return Key(name, shapes, tuple([kinds] * len(shapes) if isinstance(kinds, str) else kinds), tuple(values))


def recorded(tmp_path, call):
    """What torch itself records of a call: operators by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    return {key.name: key for key in read_trace(tmp_path / "t.json").keys}


@pytest.mark.parametrize(
    ("mask", "products"), [("[True, True, True]", 2), ("[False, True, True]", 1), ("[True, False, False]", 1)]
)
def test_a_convolutions_backward_has_a_product_for_each_gradient(mask, products):
    found = cost(keyed("aten::convolution_backward", [GRADIENT, IMAGE, KERNEL], "float", (*LISTS, mask)))
    assert found.flops == products * PRODUCT


def test_a_convolutions_backward_as_torch_records_it(tmp_path):
    layer, image = nn.Conv2d(8, 16, 3, padding=1), torch.ones(IMAGE, requires_grad=True)
    keys = recorded(tmp_path, lambda: layer(image).sum().backward())
    assert cost(keys["aten::convolution_backward"]).flops == 2 * PRODUCT
    assert cost(keys["aten::mkldnn_convolution"]).flops == PRODUCT


@pytest.mark.parametrize(("padding", "stride", "dilation"), [(0, 1, 1), (2, 1, 1), (1, 2, 1), (0, 3, 2), (4, 1, 4)])
def test_a_convolution_writes_what_it_does(tmp_path, padding, stride, dilation):
    layer = nn.Conv2d(3, 4, 3, stride, padding, dilation)
    image = torch.ones(2, 3, 11, 9)
    with torch.no_grad():
        keys = recorded(tmp_path, lambda: layer(image))
        assert cost(keys["aten::mkldnn_convolution"]).bytes_written == 4 * layer(image).numel()


def test_a_transposed_convolution_is_no_view(tmp_path):
    layer = nn.ConvTranspose2d(8, 16, 4, stride=2)
    keys = recorded(tmp_path, lambda: layer(torch.ones(IMAGE)))
    assert cost(keys["aten::_convolution"]).flops == 2.0 * 2 * 8 * 32 * 32 * 16 * 16


@pytest.mark.parametrize(
    ("name", "shape", "causal"),
    [
        ("aten::_scaled_dot_product_flash_attention", [2, 8, 256, 64], ["", "", "", "0.", "True"]),
        ("aten::_flash_attention_forward", [2, 256, 8, 64], [*[""] * 5, "256", "256", "0.", "True"]),
        ("aten::_efficient_attention_forward", [2, 256, 8, 64], [*[""] * 8, "0.", "1"]),
        ("aten::_flash_attention_backward", [2, 256, 8, 64], [*[""] * 8, "256", "256", "0.", "True"]),
        ("aten::_scaled_dot_product_efficient_attention_backward", [2, 8, 256, 64], [*[""] * 9, "0.", "[]", "True"]),
    ],
)
def test_attention_is_counted_in_either_layout(name, shape, causal):
    """With every token seeing all, and none after itself; backward has five products where forward has two."""
    backward = name.endswith("backward")
    product = 2.0 * 2 * 8 * 256 * 256 * 64
    whole = cost(keyed(name, [shape] * (5 if backward else 3), HALF))
    assert whole.flops == (5 if backward else 2) * product
    half = cost(keyed(name, [shape] * (5 if backward else 3), HALF, causal))
    assert half.flops == pytest.approx(whole.flops * 257 / 512)


def test_attention_as_torch_records_it(tmp_path):
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    keys = recorded(tmp_path, lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())
    pairs = 16 * 17 / 2
    assert cost(keys["aten::_scaled_dot_product_flash_attention_for_cpu"]).flops == 2 * 2 * 2 * pairs * 8
    assert cost(keys["aten::_scaled_dot_product_flash_attention_for_cpu_backward"]).flops == 5 * 2 * 2 * pairs * 8


def test_attention_of_rows_of_several_lengths_is_not_guessed():
    assert cost(keyed("aten::_flash_attention_forward", [[300, 8, 64]] * 3, HALF)) is None


@pytest.mark.parametrize(
    ("name", "shapes", "kinds", "most"),
    [
        ("aten::_embedding_bag", [[1 << 20, 64], [512], [32]], ["float", LONG, LONG], 512 * (256 + 8) + 32 * 256),
        ("aten::index_copy_", [[1 << 20, 64], [], [4], [4, 64]], ["float", "Scalar", LONG, "float"], 2 * 1024 + 32),
        ("aten::scatter_add_", [[1 << 20], [], [9], [9]], ["float", "Scalar", LONG, "float"], 9 * 16),
        ("aten::nll_loss_forward", [[64, 32000], [64]], ["float", LONG], 64 * 16),
        ("aten::nll_loss_backward", [[], [64, 32000], [64]], ["float", "float", LONG], 64 * 32000 * 4 + 512),
        ("aten::linalg_vector_norm", [[1 << 20]], ["float"], 4 << 20),
        ("aten::mul", [[], [1 << 20]], ["double", "float"], (8 << 20) + 8),
    ],
)
def test_what_touches_a_part_has_no_floor_of_the_whole(name, shapes, kinds, most):
    assert cost(keyed(name, shapes, kinds)).bytes == most


@pytest.mark.parametrize(
    ("name", "shapes", "kinds", "moved"),
    [
        ("aten::mul", [[], [1000], [1000]], ["double", "float", "float"], 8 + 8000),  # the third is ``out``
        ("aten::add_", [[1000], [1000], []], ["float", "float", "Scalar"], 12000),
        ("aten::abs", [[1000], [0]], ["c10::complex<float>", "float"], 8000 + 4000),
        ("aten::gt", [[1000], []], ["float", "Scalar"], 4000 + 1000),
        ("aten::exponential_", [[1000], [], []], ["float", "Scalar", ""], 4000),
        ("aten::mse_loss", [[1000], [1000], []], ["float", "float", "Scalar"], 8000),
        ("aten::take", [[1 << 20], [4]], ["float", LONG], 0),
        ("aten::searchsorted", [[1 << 20], [4], [], [], [], []], ["float", "float", *["Scalar"] * 2, "", ""], 16 + 16),
        ("aten::index_select", [[1 << 20, 64], [], [4]], ["float", "Scalar", LONG], 2 * 1024 + 32),
        ("aten::nll_loss2d_forward", [[4, 1000, 9, 9], [4, 9, 9]], ["float", LONG], 324 * 16),
        ("aten::avg_pool2d_backward", [[4, 8, 8], [4, 16, 16]], ["float", "float"], 1024 + 4096),
        ("aten::view_as_real", [[1000]], ["c10::complex<float>"], 0),
        ("aten::transpose_", [[1000, 1000], [], []], ["float", "Scalar", "Scalar"], 0),
    ],
)
def test_what_is_written_is_what_the_operator_says(name, shapes, kinds, moved):
    assert cost(keyed(name, shapes, kinds)).bytes == moved


def test_numbers_that_a_tensor_repeats_count_once(tmp_path):
    row = torch.ones(64)
    keys = recorded(tmp_path, lambda: torch.add(row.expand(1000, 64), 1, out=torch.empty(1000, 64)))
    assert cost(keys["aten::add"]).bytes == 4 * (64 + 64_000) + 8


def test_nobody_knows_how_much_a_sparse_tensor_has(tmp_path):
    sparse = torch.sparse_coo_tensor(
        torch.zeros(2, 3, dtype=torch.long), torch.ones(3), (1 << 10, 1 << 10), check_invariants=True
    )
    keys = recorded(tmp_path, lambda: torch.sparse.mm(sparse, torch.ones(1 << 10, 8)))
    assert cost(keys["aten::_sparse_mm"]) is None and cost(keys["aten::addmm"]) is None


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
def test_a_fused_optimizer_has_its_parameters_type(tmp_path, optimizer):
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    step = getattr(torch.optim, optimizer)([weight], fused=True)

    def train():
        (weight * torch.ones(64, 64, dtype=torch.bfloat16)).sum().backward()
        step.step()

    train()
    found = cost(recorded(tmp_path, train)[f"aten::_fused_{optimizer.lower()}_"])
    states = {"AdamW": 7, "SGD": 3, "Adagrad": 5}[optimizer]  # of SGD's the momentum is empty
    assert found.bytes == pytest.approx(states * 2 * 4096, rel=0.01)


def test_a_kernels_template_says_what_lists_hold():
    limits = preset("h100").ceilings()
    added = Key("aten::_foreach_add_", [[[1 << 20]] * 4, [[1 << 20]] * 4, []], ("TensorList", "TensorList", "Scalar"))
    kernel = "void multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<{}, 2, 2, 0>, float>()"
    wide = floor(added, limits, kernel.format("float"))
    assert wide == pytest.approx(3 * 16 * (1 << 20) / limits.copy_bytes_per_second)
    assert floor(added, limits, kernel.format("c10::BFloat16")) == wide / 2


def test_what_an_operator_calls_has_the_floor_alone(tmp_path):
    """``zero_`` calls ``fill_``, and ``clone`` copies."""
    x = torch.ones(1 << 20)
    with Explain(LIMITS, stacks=False) as run:
        x.zero_()
        x.clone()
        torch.isnan(x)
    floors = {op.key.name: op.floor for op in run.result.split.ops}
    assert floors["aten::zero_"] == floors["aten::clone"] == floors["aten::isnan"] == 0
    assert min(floors["aten::fill_"], floors["aten::copy_"], floors["aten::ne"]) >= (4 << 20) / 1e9


def test_numbers_are_updated_in_place_faster_than_they_are_copied():
    update = keyed("aten::add_", [[1 << 20], [1 << 20], []], ["float", "float", "Scalar"])
    assert floor(update, LIMITS) == pytest.approx((12 << 20) / 2e9)
    fresh = keyed("aten::add", [[1 << 20], [1 << 20], []], ["float", "float", "Scalar"])
    assert floor(fresh, LIMITS) == pytest.approx((12 << 20) / 1e9)


def test_a_fused_adam_reads_four_tensors_and_writes_three():
    many = [[[1000], [10]]] * 4
    assert cost(keyed("aten::_fused_adamw_", many, "TensorList")).bytes == 7 * 4 * 1010


def test_types_of_eight_bits_are_products_at_their_rate():
    limits = preset("h100").ceilings()
    shapes = [[4096, 4096], [4096, 4096], [], []]
    product = keyed("aten::_scaled_mm", shapes, [FP8, FP8, "float", "float"])
    assert floor(product, limits) == pytest.approx(2.0 * 4096**3 / limits.flops_per_second["float8_e4m3fn"])
    assert cost(keyed("aten::mul", [[4096], [4096]], ["c10::quint8", "float"])) is None


@pytest.mark.parametrize(
    "kernel", ["sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", "cutlass_80_tensorop_s1688gemm_128x128_nn_align4"]
)
def test_float32_on_tensor_cores_has_their_floor(kernel):
    """Convolutions do so by default, and an operator's types say float32 all the same."""
    limits = preset("h100").ceilings()
    product = keyed("aten::mm", [[4096, 4096], [4096, 4096]], "float")
    assert floor(product, limits, kernel) == pytest.approx(2.0 * 4096**3 / limits.flops_per_second["tf32"])
    assert floor(product, limits, "cutlass_80_simt_sgemm_128x64") == pytest.approx(
        2.0 * 4096**3 / limits.flops_per_second["float32"]
    )
    assert dtype_of(keyed("aten::mm", [[8, 8], [8, 8]], HALF), kernel) == "bfloat16"


@pytest.mark.parametrize("name", ["aten::_cudnn_rnn", "aten::mkldnn_rnn_layer", "aten::_grouped_mm"])
def test_what_no_shape_says_is_not_guessed(name):
    assert cost(keyed(name, [[32, 16, 64], [512, 64]], "float")) is None


def test_odd_values_stop_nothing(tmp_path):
    """Shapes and arguments of the wrong number, as a foreign trace may have them."""
    for name in ("aten::convolution_backward", "aten::_convolution", "aten::cudnn_convolution", "aten::_embedding_bag"):
        for shapes in ([], [[]], [[4], [4]], [[4], [4], [4]], [[2, 3, 4, 4], [3, 3]]):
            for values in ((), ("[",), ("", "", "", "[x]", "[]", "", "True")):
                found = cost(keyed(name, shapes, "float", values))
                assert found is None or (found.flops >= 0 and found.bytes >= 0)
