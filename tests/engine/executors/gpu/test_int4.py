"""Serving in 4 bits on a GPU: the tokens of the dequantized weights, with graphs and without."""

import pytest
import torch
from tiny_llm import save_tiny_llm

from transect.checkpoints.load import allocated, fill, stored_weights
from transect.checkpoints.resolve import resolve
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.staging import Staging
from transect.models.weights.int4_serving import ServingInt4, rounded
from transect.models.weights.kinds import kinds_for
from transect.ops.opset import resolve_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_llm(folder, **SIZES)
    return str(folder)


@pytest.mark.parametrize("rows", [1, 3, 9, 17, 40, 64, 65, 200])
@pytest.mark.parametrize("inputs", [256, 704, 576])
def test_products_of_any_number_of_rows(rows, inputs):
    """Rows in CUDA C++, rebuilt for many; rows of a matrix that are no whole groups."""
    kind = kinds_for("int4", "cuda", dependent_launch=True)("attention.q")
    weight = kind(96, inputs, ops=resolve_ops("cuda"), device="cuda", dtype=torch.bfloat16)
    values = torch.randn(96, inputs, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) / 16
    weight.load(values.cpu(), Staging("cuda"))
    x = torch.randn(rows, inputs, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    expected = x.double() @ rounded(values.cpu()).cuda().double().T
    found = weight.product()(x).double()
    assert (found - expected).norm() <= 0.01 * expected.norm()
    torch.testing.assert_close(weight.dense().float(), rounded(values.cpu()).cuda(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [1, 3, 9, 17, 40, 64, 65, 200])
@pytest.mark.parametrize("inputs", [256, 704])
def test_gate_and_up_as_one_product(rows, inputs):
    kind = kinds_for("int4", "cuda", dependent_launch=True)("mlp.gate")
    gate, up = (kind(96, inputs, ops=resolve_ops("cuda"), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    values = torch.randn(2, 96, inputs, generator=torch.Generator().manual_seed(0)) / 16
    for weight, part in zip((gate, up), values, strict=True):
        weight.load(part, Staging("cuda"))
    x = torch.randn(rows, inputs, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    found = gate.join_with([up], gated=True).gated_product()(x).double()
    sides = [x.double() @ rounded(part).cuda().double().T for part in values]
    wanted = torch.nn.functional.silu(sides[0]) * sides[1]
    assert (found - wanted).norm() <= 0.02 * wanted.norm()


def test_a_gpu_holds_what_the_cpu_holds(model):
    """Quantized on the device, the codes are those that the host makes."""
    source = resolve(model)
    held = []
    for device in ("cpu", "cuda"):
        made = Decoder(source.config, "meta", torch.bfloat16, kinds=kinds_for("int4", device))
        held.append(fill(allocated(made, device), stored_weights(source)))
    for (name, one), (_, two) in zip(*(each.weights() for each in held), strict=True):
        if isinstance(one, ServingInt4):
            assert torch.equal(one.arranged, two.arranged.cpu()), name


def answers(llm):
    prompts = [[7, 9, 11 + i] * (1 + 9 * i) for i in range(9)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_engine_draws_the_tokens_of_the_dequantized_weights(model):
    """In float32, where the order of sums moves no token: graphs on and off, beside plain torch on the CPU."""
    settings = {"max_model_len": 256, "kv_cache_tokens": 4096, "quantization": "int4", "dtype": "float32"}
    expected = answers(LLM(model, device="cpu", native=False, **settings))
    for graphs in ("on", "off"):
        found = answers(LLM(model, device="cuda", cuda_graphs=graphs, max_num_seqs=16, **settings))
        assert found == expected


def test_in_bfloat16_the_engine_is_sane_and_takes_less_memory(model):
    settings = {"max_model_len": 256, "kv_cache_tokens": 4096, "device": "cuda", "max_num_seqs": 16}
    small, large = LLM(model, quantization="int4", **settings), LLM(model, **settings)
    assert "weights in int4" in small.kernels and "int4" not in large.kernels
    assert all(len(tokens) == 16 for tokens in answers(small))


def test_the_fused_stack_joins_what_is_in_4_bits(model):
    source = resolve(model)
    made = Decoder(source.config, "meta", torch.bfloat16, ops=resolve_ops("cuda", ("triton", "torch")),
                   kinds=kinds_for("int4", "cuda", dependent_launch=True))  # fmt: skip
    decoder = fill(allocated(made, "cuda"), stored_weights(source))
    stack = FusedStack(decoder, max_positions=64)
    qkv = decoder.layers[0].attention.qkv
    whole = qkv.join()
    assert whole.arranged.is_contiguous() and whole.arranged.data_ptr() == qkv.parts["q"].arranged.data_ptr()
    x = torch.randn(5, source.config.dim, device="cuda", dtype=torch.bfloat16)
    together, apart = stack._layers[0].qkv(x), torch.cat([each(x) for each in qkv.products()], -1)
    assert (together.double() - apart.double()).norm() <= 0.01 * apart.double().norm()
