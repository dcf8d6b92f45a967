"""A model that is served in 4 bits, quantized when it is loaded: the engine's side of it, on the CPU."""

import math

import pytest
import torch
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.checkpoints.load import fill, load_model, stored_weights
from transect.checkpoints.resolve import resolve
from transect.costs.storage import storage_for
from transect.engine.build import storage_of_model
from transect.engine.config import EngineConfig
from transect.models.context import VarlenContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.weights.int4_serving import ServingInt4
from transect.models.weights.kinds import kinds_for
from transect.models.weights.packed import Packed
from transect.ops.lang.jit import INTERPRETED
from transect.ops.opset import resolve_ops

PROMPTS = [[5, 17, 80, 3], [60, 61, 62, 63, 64, 65, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder, intermediate_size=96)
    return str(folder)


def tokens(model, quantization="int4", **settings):
    llm = LLM(model, quantization=quantization, max_model_len=64, kv_cache_tokens=512, device="cpu", **settings)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)], llm.kernels


@pytest.mark.parametrize(("quantization", "bits"), [("int4", "4 bits"), ("fp8", "fp8"), ("int8", "int8")])
def test_the_kernels_and_plain_torch_agree(tiny, quantization, bits):
    native, line = tokens(tiny, quantization, native=True, dtype="float32")
    plain, other = tokens(tiny, quantization, native=False, dtype="float32")
    assert native == plain
    assert line.endswith(f"the layers' weights in {bits}")
    assert other == f"plain torch in float32, the layers' weights rounded to {bits} (native=False)"


def test_matrices_are_held_in_4_bits_and_the_head_as_it_was(tiny):
    model = load_model(resolve(tiny), quantization="int4", native=True, threads=1)
    kinds = {name: weight.format.name for name, weight in model.weights()}
    assert kinds.pop("head") == "BF16"
    assert set(kinds.values()) <= {"Q4_HALF", "Q4_FLOAT"}
    assert all(isinstance(weight, Packed) for _, weight in model.weights())


def test_the_fused_stack_holds_no_second_copy_of_what_is_joined(tiny, monkeypatch):
    """A part of a joined matrix has its own product only by a copy; nobody may ask for it who will not use it."""
    model = Decoder(resolve(tiny).config, "meta", torch.bfloat16, kinds=kinds_for("int4", "cpu"))
    model.join()
    asked = []
    product = ServingInt4.product
    monkeypatch.setattr(ServingInt4, "product", lambda weight: asked.append(weight) or product(weight))
    FusedStack(model.to_empty(device="cpu"), max_positions=64)
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert any(weight is attention.qkv.join() for weight in asked) and any(weight is mlp.down for weight in asked)
    assert not {id(part) for part in (*attention.qkv.matrices, *mlp.gate_up.matrices)} & {id(part) for part in asked}


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is chosen before its import, where there is no GPU")
@pytest.mark.parametrize("fused", [True, False])
def test_on_the_kernels_of_a_gpu(tiny, fused):
    """In Triton's interpreter: products in 4 bits, joined and filled up to whole groups, with the gate after them."""
    source = resolve(tiny)
    exact = load_model(source, dtype="float32", native=False, quantization="int4")
    ops = resolve_ops("cpu")
    model = Decoder(source.config, "meta", torch.float32, ops=ops, kinds=kinds_for("int4", "cpu"))
    model.join()
    model = fill(model.to_empty(device="cpu"), stored_weights(source)).requires_grad_(False)
    weights = dict(model.weights())
    assert isinstance(weights["layers.0.mlp.up"], ServingInt4) and not isinstance(model.head, ServingInt4)
    assert weights["layers.0.mlp.up"].arranged.shape[0] == math.ceil(source.config.dim / 128)
    context = VarlenContext(torch.tensor([0, 9], dtype=torch.int32), ops)
    expected = exact.logits(exact(torch.arange(9), context.positions(), context))
    if fused:
        stack = FusedStack(model, max_positions=64)
        normed = model.layers[0].attention_norm(model.embed(torch.arange(3)))
        for layer, other in zip(stack._layers, exact.layers, strict=True):
            torch.testing.assert_close(layer.qkv(normed), other.attention.qkv(normed), rtol=1e-4, atol=1e-4)
            gate, up = other.mlp.gate_up.apart(normed)
            expected_gated = torch.nn.functional.silu(gate) * up
            torch.testing.assert_close(layer.gated(normed), expected_gated, rtol=1e-4, atol=1e-4)
        return
    found = model.logits(model(torch.arange(9), context.positions(), context))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_what_is_planned_is_what_the_weights_say(tiny):
    config = resolve(tiny).config
    for quantization in (None, "int4"):
        model = Decoder(config, "meta", torch.bfloat16, kinds=kinds_for(quantization, "cpu"))
        planned, own = storage_for(2, quantization), storage_of_model(model)
        rows_filled_up = {"int4": 128 / 64, None: 1}[quantization]  # the tiny model's rows are half a group long
        if quantization is None:
            assert own == planned
        assert own.of("attention.q") == planned.linear * rows_filled_up
        assert (own.head, own.embed, own.norm) == (16, 16, 16)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="quantization must be int4, fp8 or int8, or left out, not 'int3'"):
        EngineConfig(model="any", quantization="int3")


@pytest.mark.prove
def test_smollm2_predicts_a_text_as_its_dequantized_weights_do(smollm2):
    from transect.text.tokenizer import Tokenizer

    text = (
        "The Amazon is the largest river of the world by the water that it carries. It begins high in the mountains of "
        "Peru and flows through the forest to the east, until it reaches the Atlantic Ocean. Many kinds of fish, birds "
        "and plants live on its banks, and most of them are found nowhere else."
    )
    ids = torch.tensor(Tokenizer.from_source(smollm2).encode(text, add_special_tokens=True))
    context = VarlenContext(torch.tensor([0, len(ids)], dtype=torch.int32))
    perplexity = {}
    for name, native in (("4 bits", True), ("dequantized", False)):
        model = load_model(smollm2, dtype="float32", quantization="int4", native=native, threads=1)
        with torch.inference_mode():
            logits = model.logits(model(ids, context.positions(), context))
        perplexity[name] = float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).exp())
    assert perplexity["4 bits"] == pytest.approx(perplexity["dequantized"], rel=0.02)
    assert perplexity["4 bits"] < 40
