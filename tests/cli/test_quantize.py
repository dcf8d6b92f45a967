"""``transect quantize``: what it writes is loaded here and in transformers, with the same logits."""

import json

import pytest
import torch
from commands import run_here
from tiny_llm import save_tiny_llm

from transect.models.context import VarlenContext
from transect.models.load import load_model
from transect.models.quantized_layouts import codes_to_words, words_to_codes
from transect.models.resolve import resolve

TOKENS = [5, 9, 77, 42, 13, 8]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    save_tiny_llm(folder, hidden_size=128, intermediate_size=256)
    return folder


def logits(path):
    model = load_model(resolve(str(path)), dtype="float32", native=False)
    context = VarlenContext(torch.tensor([0, len(TOKENS)], dtype=torch.int32), model.ops)
    with torch.no_grad():
        return model.logits(model(torch.tensor(TOKENS), context.positions(), context)), model


@pytest.mark.parametrize(("name", "most"), [("fp8", 1 / 16), ("int8", 1 / 127), ("int4", 1 / 7)])
def test_safetensors(plain, tmp_path, name, most):
    out = tmp_path / "out"
    done = run_here("quantize", str(plain), "-o", str(out), "--format", name)
    assert done.returncode == 0 and name in done.stdout
    ours, rounded = logits(out)
    exact, model = logits(plain)
    for key in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight"):
        weight, near = model.get_parameter(key), rounded.get_parameter(key)
        error = (weight - near).abs().max()
        assert 0 < error <= most * weight.abs().max()
    assert torch.equal(model.head.weight, rounded.head.weight)
    assert (ours - exact).abs().max() > 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_transformers_loads_it(plain, tmp_path, name):
    pytest.importorskip("compressed_tensors")
    import transformers

    out = tmp_path / "out"
    assert run_here("quantize", str(plain), "-o", str(out), "--format", name).returncode == 0
    how = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=how).eval()
    for group in json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    for module in theirs.modules():  # weights alone: activations are rounded for each token else
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            scheme.input_activations = None
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    assert (logits(out)[0] - want).abs().max() < 2e-3


def test_gguf_goes_the_way_of_export(plain, tmp_path):
    """The same writer, so the same refusal of a tokenizer that GGUF cannot hold."""
    done = run_here("quantize", str(plain), "-o", str(tmp_path / "m.gguf"), "--format", "q8_0")
    assert done.returncode == 2 and "byte-level BPE" in done.stderr


def test_words_and_codes():
    codes = torch.randint(0, 16, (3, 24), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    assert torch.equal(words_to_codes(codes_to_words(codes)), codes)


def test_what_cannot_be(plain, tmp_path):
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    save_tiny_llm(narrow)
    for source, output, name, sentence in (
        (plain, plain, "fp8", "is there already"),
        (plain, tmp_path / "a", "int3", "int3"),
        (narrow, tmp_path / "b", "int4", "cannot be cut into groups of 128; take fp8 or int8"),
    ):
        done = run_here("quantize", str(source), "-o", str(output), "--format", name)
        assert done.returncode == 2 and sentence in done.stderr
