"""Quantized checkpoints whose matrices stay packed in memory: the products of their values, their bytes, their cuts."""

import copy
import json

import pytest
import torch
from commands import run_here
from quantized_files import awq, fp8, gptq, int8, packed, packed8
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_model, save_mxfp4, write_gguf
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.checkpoints.layouts import held_layouts, storage_of
from transect.checkpoints.load import allocated, fill, load_model, stored_weights
from transect.checkpoints.resolve import resolve
from transect.costs.storage import storage_for, storage_held
from transect.models.context import VarlenContext
from transect.models.decoder import Decoder
from transect.models.native import packed_matrices
from transect.models.weights import int4_serving
from transect.models.weights.as_stored import AsStored
from transect.models.weights.kinds import kinds_for
from transect.models.weights.scaled8 import Scaled8
from transect.ops.linear.packed.eight_bit import scaled8_tiles

COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS = {
    "gptq": (lambda w: gptq(w, size=32), {"quant_method": "gptq", "bits": 4, "group_size": 32}, ("int4", 5.0)),
    "gptq-act-order": (lambda w: gptq(w, True, 32), {"quant_method": "gptq", "group_size": 32}, ("int4", 5.0)),
    "awq": (
        lambda w: awq(w, 32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        ("int4", 5.0),
    ),
    "packed": (lambda w: packed(w, 32), COMPRESSED, ("int4", 5.0)),
    "packed-8": (packed8, COMPRESSED, ("int8", 8.0)),
    "fp8-tensor": (lambda w: fp8(w, 999, 999), COMPRESSED, ("fp8", 8.0)),
    "fp8-channel": (lambda w: fp8(w, 1, 999), COMPRESSED, ("fp8", 8.0)),
    "fp8-block": (
        lambda w: fp8(w, 128, 128, "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        ("fp8", 8.0),
    ),
    "int8": (int8, COMPRESSED, ("int8", 8.0)),
}
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by format; one layer's ``down_proj`` is left as it was."""
    plain = tmp_path_factory.mktemp("plain")
    save_tiny_llm(plain, **SIZES)
    made = {}
    for name, (quantize, settings, _) in FORMATS.items():
        folder, tensors = tmp_path_factory.mktemp(name), {}
        for tensor, weight in load_file(plain / "model.safetensors").items():
            if "_proj" in tensor and "layers.1.mlp.down" not in tensor:
                parts = quantize(weight.float())[1]
                tensors |= {f"{tensor.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
            else:
                tensors[tensor] = weight
        save_file(tensors, folder / "model.safetensors")
        for file in plain.glob("*.json"):
            (folder / file.name).write_text(file.read_text())
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
        (folder / "config.json").write_text(json.dumps(config))
        made[name] = resolve(str(folder))
    return made


def logits(model, tokens=(5, 6, 7, 9)):
    context = VarlenContext(torch.tensor([0, len(tokens)], dtype=torch.int32), model.ops)
    with torch.no_grad():
        return model.logits(model(torch.tensor(tokens), context.positions(), context)).float()


def errors(found, exact):
    """Root mean square of what is missed."""
    return (found.double() - exact.double()).pow(2).mean().sqrt()


def check_layers(held, dense, format_):
    """Each weight and its product miss the values by little more than those of bfloat16 do. A scale that is wrong by a
    hundredth misses five times as much."""
    bound = 3.5 if format_ == "int4" else 1.5  # scales and zeros of 4 bits are in bfloat16, each rounded by itself
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer in range(2):
        weight, values = (model.get_submodule(f"layers.{layer}.mlp.up") for model in (held, dense))
        assert isinstance(weight, AsStored) and weight.format.name.startswith(format_)
        exact, device = values.weight, weight.dense().device
        assert errors(weight.dense().cpu(), exact) <= bound * errors(exact.bfloat16(), exact)
        want = x.float() @ exact.T
        rounded = x @ exact.bfloat16().T
        assert errors(weight(x.to(device)).cpu(), want) <= bound * errors(rounded, want)


@pytest.fixture
def by_torch(monkeypatch):
    """Not by Triton's interpreter, which takes seconds for a model."""
    monkeypatch.setattr(int4_serving, "runs_triton", lambda *tensors: False)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("name", FORMATS)
def test_plain_torch_holds_what_the_checkpoint_packs(checkpoints, name):
    """Values, products and logits miss those of dequantizing by little more than bfloat16 does; fewer bytes."""
    source, (format_, bits) = checkpoints[name], FORMATS[name][2]
    held = load_model(source, native=False)
    dense = load_model(source, native=False, dtype="float32")
    check_layers(held, dense, format_)
    assert all(layer.mlp.up.format.bits <= 1.1 * bits + 0.4 for layer in held.layers)
    assert held.layers[1].mlp.down.format.name == "dense 16-bit"
    tokens, half = range(5, 45), copy.deepcopy(dense).bfloat16()
    exact = logits(dense, tokens)
    assert errors(logits(held, tokens), exact) <= 2 * errors(logits(half, tokens), exact)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_planned_is_what_is_held(checkpoints, name):
    format_, bits = FORMATS[name][2]
    layouts = dict(held_layouts(checkpoints[name]))
    assert {layout.label for layout in layouts.values()} == {format_} and "attention.q" in layouts
    storage = storage_held(storage_for(2), tuple(layouts.items()))
    assert storage.of("attention.q") == bits and storage.of("head") == 16
    assert getattr(layouts["attention.q"], "ordered", False) == (name == "gptq-act-order")


def test_memory_and_floors_count_packed_matrices(checkpoints):
    arguments = ("--serve", "--device", "cuda", "--device-memory", "4GB", "--context", "32", "--max-num-seqs", "4")
    weights = []
    for more in ((), ("--dtype", "float32"), ("--kv-cache-dtype", "fp8")):
        done = run_here("memory", str(checkpoints["fp8-channel"].path), *arguments, "--json", *more)
        assert done.returncode == 0, done.stderr
        weights.append(json.loads(done.stdout))
    held, exact, small = ({term["name"]: term["bytes"] for term in each["terms"]} for each in weights)
    assert held["weights"] < exact["weights"] / 2.2 and small["KV cache"] == held["KV cache"] // 2
    storage = storage_of(checkpoints["fp8-channel"], "auto", keeps_quantized=False)
    assert storage.of("attention.q") == 8 and storage.head == 16


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "packed-8", "int8"])
def test_the_cpp_kernels_hold_whole_numbers(checkpoints, name):
    model = load_model(checkpoints[name])
    dense = load_model(checkpoints[name], native=False, dtype="float32")
    matrices = packed_matrices(model)
    if not matrices:
        pytest.skip("the C++ kernels do not run here")
    held = matrices["layers.0.mlp.up.weight"]
    assert held.format.bits <= (10 if name in ("int8", "packed-8") else 7)
    torch.testing.assert_close(held.dense(), dense.layers[0].mlp.up.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-block"])
def test_served(checkpoints, name):
    settings = {"device": "cpu", "native": False, "max_model_len": 64, "kv_cache_tokens": 256}
    llm = LLM(str(checkpoints[name].path), **settings)
    answer = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
    assert len(answer.outputs[0].token_ids) == 4
    llm.close()


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("type_name", ["Q4_0", "Q5_1", "Q8_0"])
def test_blocks_of_a_gguf_file_stay_blocks(tmp_path, type_name):
    """A GPU holds the blocks, the head's too; the values are the file's."""
    source = resolve(str(write_gguf(tmp_path / "m.gguf", make_model("llama"), type_name)))
    layouts = dict(held_layouts(source))
    assert held_layouts(source, gguf=False) == ()
    assert {layout.units.name for layout in layouts.values()} == {type_name} and "head" in layouts
    kinds = kinds_for(None, "cpu", layouts=tuple(layouts.items()))
    model = fill(allocated(Decoder(source.config, "meta", torch.bfloat16, kinds=kinds), "cpu"), stored_weights(source))
    dense = load_model(source, native=False, dtype="float32")
    for (name, held), (_, values) in zip(model.weights(), dense.weights(), strict=True):
        assert held.format.name == type_name, name
        torch.testing.assert_close(held.dense(), values.dense().to(torch.bfloat16), rtol=0, atol=0)
    for one, other in zip(model.layers, dense.layers, strict=True):  # as a stack joins them
        for joined, parts in ((one.attention.qkv, other.attention.qkv), (one.mlp.gate_up, other.mlp.gate_up)):
            whole = joined.join()
            if whole is None:
                continue
            torch.testing.assert_close(whole.dense(), parts.dense().to(torch.bfloat16), rtol=0, atol=0)
            x = torch.randn(3, joined.in_features).to(torch.bfloat16)
            wanted = x.float() @ parts.dense().T
            assert (whole.product()(x).float() - wanted).norm() < 0.02 * wanted.norm()
            gated = whole.gated_product()
            if gated is not None:
                gate, up = wanted.chunk(2, -1)
                wanted = torch.nn.functional.silu(gate) * up
                assert (gated(x).float() - wanted).norm() < 0.03 * wanted.norm()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Experts in MXFP4, as gpt-oss has them: blocks of 32 inputs, gate and up in turn."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    save_mxfp4(folder, hidden_size=64, intermediate_size=32)
    return resolve(str(folder))


def test_experts_in_mxfp4_stay_packed(gpt_oss):
    """The values and products of the file's numbers, at 4.5 bits each; logits as near as those of bfloat16 are."""
    assert {name: layout.units.name for name, layout in held_layouts(gpt_oss)} == dict.fromkeys(
        ("mlp.experts_gate", "mlp.experts_up", "mlp.experts_down"), "MXFP4"
    )
    assert storage_held(storage_for(2), held_layouts(gpt_oss)).of("mlp.experts_up") == 4.5
    held, dense = load_model(gpt_oss, native=False), load_model(gpt_oss, native=False, dtype="float32")
    starts, x = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32), torch.randn(6, 64)
    for one, other in zip(held.layers, dense.layers, strict=True):
        for name in ("experts_gate", "experts_up", "experts_down"):
            packed, values = getattr(one.mlp, name), getattr(other.mlp, name)
            assert packed.format.name == "MXFP4"
            assert torch.equal(packed.dense().float(), values.dense())
            rows = x[:, : packed.in_features].bfloat16()
            wanted = values.grouped(rows.float(), starts)
            torch.testing.assert_close(packed.grouped(rows, starts).float(), wanted, rtol=0.02, atol=0.02)
    tokens, half = range(5, 45), copy.deepcopy(dense).bfloat16()
    exact = logits(dense, tokens)
    assert errors(logits(held, tokens), exact) <= 2 * errors(logits(half, tokens), exact)


@pytest.mark.parametrize("name", ["gptq", "packed", "fp8-channel", "int8"])
def test_packed_experts_are_held_as_one(tmp_path, name):
    """Each expert is packed for itself in the files; rows of some of them are read alone."""
    model = make_model("mixtral", hidden_size=64, intermediate_size=32)
    model.save_pretrained(tmp_path)
    quantize, settings, (format_, _) = FORMATS[name]
    tensors = {}
    for tensor, weight in load_file(tmp_path / "model.safetensors").items():
        if ".experts." in tensor:
            parts = quantize(weight.float())[1]
            tensors |= {f"{tensor.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
        else:
            tensors[tensor] = weight
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve(str(tmp_path))
    assert {layout.label for _, layout in held_layouts(source)} == {format_}
    held, dense = load_model(source, native=False), load_model(source, native=False, dtype="float32")
    starts = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    for one, other in zip(held.layers, dense.layers, strict=True):
        packed, values = one.mlp.experts_down, other.mlp.experts_down
        assert packed.format.name.startswith(format_)
        torch.testing.assert_close(packed.dense().float(), values.dense(), rtol=0.01, atol=2e-3)
        rows = torch.randn(6, packed.in_features).bfloat16()
        torch.testing.assert_close(
            packed.grouped(rows, starts).float(), values.grouped(rows.float(), starts), rtol=0.03, atol=0.03
        )
    weights = stored_weights(source)
    stored = next(stored for name, stored in weights if name.endswith("experts_up.weight"))
    whole, part = (stored.codes(slice(*rows), slice(None)) for rows in ((None,), (24, 70)))
    assert torch.equal(part.codes, whole.codes[24:70]) and torch.equal(part.scale, whole.scale[24:70])
    weights.close()


def test_parts_of_experts_in_mxfp4_are_read_alone(gpt_oss):
    weights = stored_weights(gpt_oss)
    stored = next(stored for name, stored in weights if name == "layers.0.mlp.experts_up.weight")
    whole = stored.codes(slice(None), slice(None)).blocks
    part = stored.codes(slice(20, 90), slice(32, 64)).blocks  # of three experts
    assert whole.shape == (4 * 32, 2 * 17) and torch.equal(part, whole[20:90, 17:])
    with pytest.raises(ValueError, match=r"packs 32 numbers of a row together.*columns 16 and 64"):
        stored.codes(slice(None), slice(16, 64))
    weights.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("type_name", ["Q4_0", "Q5_1", "Q8_0"])
def test_on_a_gpu_products_are_of_a_gguf_files_blocks(tmp_path, type_name):
    source = resolve(str(write_gguf(tmp_path / "m.gguf", make_model("llama"), type_name)))
    dense = load_model(source, native=False, dtype="float32")
    model = load_model(source, device="cuda")
    for layer, exact in zip(model.layers, dense.layers, strict=True):
        for held, values in ((layer.attention.o, exact.attention.o), (layer.mlp.down, exact.mlp.down)):
            assert held.format.name == type_name
            for rows in (1, 5, 16, 33, 80):
                x = torch.randn(rows, held.in_features, device="cuda").to(torch.bfloat16)
                wanted = x.cpu().float() @ values.dense().T
                assert (held.product()(x).float().cpu() - wanted).norm() < 0.01 * wanted.norm()


Q = "model.layers.0.self_attn.q_proj"
DAMAGE = [
    ("gptq", lambda t: t[f"{Q}.scales"].fill_(torch.nan), r"scales of '.*q_proj\.weight' hold infinite or NaN"),
    ("gptq-act-order", lambda t: t[f"{Q}.g_idx"].fill_(99), r"q_proj\.g_idx' names groups that do not exist"),
    ("awq", lambda t: t[f"{Q}.scales"].fill_(torch.inf), r"scales of '.*q_proj\.weight' hold infinite or NaN"),
    ("awq", lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:-1]}), r"q_proj\.qzeros' should have shape"),
    ("packed", lambda t: t[f"{Q}.weight_scale"].fill_(torch.nan), r"scales of '.*q_proj\.weight' hold infinite or NaN"),
    ("packed", lambda t: t.update({f"{Q}.weight_scale": torch.ones(128, 0)}), r"q_proj\.weight_scale' of shape"),
    (
        "packed",
        lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(1, 4)}),
        r"q_proj\.weight_zero_point' of shape",
    ),
    ("packed", lambda t: t.update({f"{Q}.weight_g_idx": torch.ones(3)}), r"q_proj\.weight_g_idx' should have shape"),
    ("fp8-tensor", lambda t: t[f"{Q}.weight_scale"].fill_(torch.inf), r"scales of '.*q_proj\.weight' hold infinite or"),
    (
        "fp8-block",
        lambda t: t[f"{Q}.weight_scale_inv"].fill_(torch.nan),
        r"scales of '.*q_proj\.weight' hold infinite or",
    ),
    (
        "fp8-tensor",
        lambda t: t[f"{Q}.weight"].view(torch.uint8)[3].fill_(0xFF),
        r"codes of '.*q_proj\.weight' hold NaN",
    ),
    ("int8", lambda t: t[f"{Q}.weight_scale"].fill_(torch.nan), r"scales of '.*q_proj\.weight' hold infinite or NaN"),
]


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(("name", "change", "sentence"), DAMAGE)
def test_damage_to_what_stays_packed_is_named(checkpoints, tmp_path, name, change, sentence):
    for file in checkpoints[name].path.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    tensors = load_file(checkpoints[name].path / "model.safetensors")
    change(tensors)
    save_file({key: each.contiguous() for key, each in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=sentence):
        load_model(resolve(str(tmp_path)), native=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_the_tokens_are_likely_ones(checkpoints, name, monkeypatch):
    """Weights and products of a layer to the digit; and the engine's own log-probabilities miss those of the values
    in float32 by little more than the same arithmetic does on a CPU."""
    llm = LLM(str(checkpoints[name].path), device="cuda", max_model_len=64, kv_cache_tokens=1024)
    assert FORMATS[name][2][0] in llm.kernels
    prompts = [[5, 6, 7 + i] * (1 + 7 * (i % 2)) for i in range(20)]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    answers = llm.generate(prompts, params)
    llm.close()
    dense = load_model(checkpoints[name], native=False, dtype="float32")
    check_layers(load_model(checkpoints[name], device="cuda"), dense, FORMATS[name][2][0])
    held = load_model(checkpoints[name], native=False)
    monkeypatch.setattr(int4_serving, "runs_triton", lambda *tensors: False)
    monkeypatch.setattr(  # twenty rows in a step: the products that round their inputs too
        Scaled8, "_by_torch", lambda own, x: scaled8_tiles.reference(x, own.codes, own.scale, own.bias, own.fp8)
    )
    given, same, wanted = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        out = answer.outputs[0]
        places, tokens = torch.arange(len(out.token_ids)) + len(prompt) - 1, torch.tensor(out.token_ids)
        given += [each[token].logprob for token, each in zip(out.token_ids, out.logprobs, strict=True)]
        for model, found in ((held, same), (dense, wanted)):
            found += torch.log_softmax(logits(model, (*prompt, *out.token_ids)), -1)[places, tokens].tolist()
    given, same, wanted = (torch.tensor(each) for each in (given, same, wanted))
    assert errors(given, wanted) <= 1.5 * errors(same, wanted) + 0.01
