"""From a name to a model that computes what transformers computes, on plain torch and on the C++ kernels."""

import dataclasses
import logging

import pytest
import torch
import transformers
from tiny_checkpoints import FAMILIES, make_model, write_gguf
from transformers.initialization import no_init_weights

from transect.checkpoints.hf import places
from transect.checkpoints.kernel_choice import kernels, kv_dtype
from transect.checkpoints.load import load_model, stored_weights
from transect.checkpoints.resolve import resolve
from transect.formats.ggml_blocks import QuantizedTensor
from transect.models.context import VarlenContext
from transect.models.stored import read_all
from transect.ops.cpu import build
from transect.ops.cpu import library as cpu_library
from transect.ops.registry import Unavailable
from transect.spec.hf import to_hf

TOKENS = [5, 17, 80, 3, 3, 42, 9, 61, 12, 33, 7, 90]


def logits(model, tokens=TOKENS):
    context = VarlenContext(torch.tensor([0, len(tokens)], dtype=torch.int32), model.ops)
    with torch.inference_mode():
        return model.logits(model(torch.tensor(tokens), context.positions(), context))


def reference_logits(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_float32_equals_transformers(tmp_path, family, kind):
    theirs = make_model(family)
    if kind == "gguf":
        name = str(write_gguf(tmp_path / "m.gguf", theirs))
    else:
        theirs.save_pretrained(tmp_path)
        name = str(tmp_path)
    source = resolve(name)
    assert source.kind == ("gguf" if kind == "gguf" else "hf")
    model = load_model(source, dtype="float32", native=False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 and not parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(logits(model), reference_logits(theirs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_quantized_models_compute_with_the_dequantized_values(tmp_path, type_name):
    theirs = make_model("smollm2")
    source = resolve(str(write_gguf(tmp_path / "m.gguf", theirs, type_name)))
    plain = load_model(source, dtype="float32", native=False)
    weights = dict(read_all(stored_weights(source)))
    for name, parameter in plain.state_dict().items():
        weight = weights["embed.weight" if name == "head.weight" else name]
        value = torch.from_numpy(weight.dequantize()) if isinstance(weight, QuantizedTensor) else weight.float()
        assert torch.equal(parameter, value), name
    change = (logits(plain) - reference_logits(theirs)).abs().max()
    assert 0 < change < 5  # logits are of the order of 10


def test_dtypes(tmp_path):
    source = resolve(str(write_gguf(tmp_path / "m.gguf", make_model("smollm2"), "Q8_0")))
    exact = logits(load_model(source, dtype="float32", native=False))
    auto = load_model(source, native=False)
    assert auto.embed.weight.dtype == torch.bfloat16 and auto.head.weight is auto.embed.weight
    assert logits(auto).dtype == torch.float32
    torch.testing.assert_close(logits(auto), exact, rtol=0, atol=0.5)
    double = logits(load_model(source, dtype="float64"))
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), exact, rtol=0, atol=1e-4)
    assert [kv_dtype(name) for name in ("auto", "float32", "float16")] == [torch.bfloat16, torch.float32, torch.float16]
    with pytest.raises(ValueError, match="dtype 'int3' is not known; choose auto, float32"):
        load_model(source, dtype="int3")


def test_weights_do_not_depend_on_the_files_afterwards(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    model = load_model(resolve(str(tmp_path)), dtype="float32", native=False)
    before = logits(model)
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as raw:  # the same inode, so that a mapping would see it
        raw.seek(file.stat().st_size // 2)
        raw.write(bytes(1000))
    assert torch.equal(logits(model), before)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Packed files go to the test's directory; the compiled library stays where it is."""
    library = build.library_path()
    monkeypatch.setattr(build, "library_path", lambda march="native": library)
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_the_cpu_kernels_compute_the_same(tmp_path, own_cache, caplog, dtype, kind):
    theirs = make_model("qwen3")
    if kind == "gguf":
        name = str(write_gguf(tmp_path / "m.gguf", theirs, "Q8_0"))
    else:
        theirs.save_pretrained(tmp_path / "m")
        name = str(tmp_path / "m")
    source = resolve(name)
    plain = logits(load_model(source, dtype="float32", native=False))
    with caplog.at_level(logging.INFO, "transect.checkpoints.load"):
        first = load_model(source, dtype=dtype, native=True, threads=1)
    assert f"{name}: C++ kernels (" in caplog.text
    bound = 1.0 if dtype == "auto" and kind == "safetensors" else 1e-3  # float32 matrices become bfloat16
    torch.testing.assert_close(logits(first), plain, rtol=0, atol=bound)
    again = load_model(source, dtype=dtype, native=True, threads=1)
    assert torch.equal(logits(again), logits(first))
    assert len(list(own_cache.rglob("*.pack"))) == (1 if kind == "gguf" else 0)


def test_which_way_runs_is_said_and_why(tmp_path, monkeypatch, caplog):
    source = resolve(str(write_gguf(tmp_path / "m.gguf", make_model("smollm2"))))
    config = source.config
    assert kernels(config, native=False) == (None, "plain torch in bfloat16 (native=False)")
    assert kernels(config, dtype="float16")[1].endswith("(the C++ kernels compute in float32 or bfloat16, not float16)")
    library, why = kernels(config, dtype="bfloat16", threads=1)
    assert why.endswith("in bfloat16" if library.bfloat16 else "this processor has no AVX512-BF16")
    assert kernels(config, device="cuda:0")[1].endswith("(the C++ kernels are for the CPU, not cuda:0)")
    odd = dataclasses.replace(config, head_dim=6)
    assert "multiple of" in kernels(odd)[1]
    with pytest.raises(ValueError, match=r"native=True, but the C\+\+ kernels need a head size"):
        kernels(odd, native=True)
    assert kernels(config, kv_cache_dtype="fp8", shared=True)[1].endswith("where ranks share a model)")
    with pytest.raises(ValueError, match=r"native=True, but .* in fp8 where ranks share a model"):
        kernels(config, native=True, kv_cache_dtype="fp8", shared=True)

    def no_compiler(threads, *, bfloat16):
        raise Unavailable("no C++ compiler found")

    monkeypatch.setattr(cpu_library, "load", no_compiler)
    with caplog.at_level(logging.INFO, "transect.checkpoints.load"):
        model = load_model(source, dtype="float32")
    assert "plain torch in float32 (no C++ compiler found)" in caplog.text
    assert logits(model).shape == (len(TOKENS), 96)
    with pytest.raises(ValueError, match=r"native=True, but no C\+\+ compiler found; leave native out"):
        load_model(source, native=True)


def test_the_real_model_in_float32_equals_transformers_on_the_dequantized_weights(smollm2):
    config = transformers.LlamaConfig(**to_hf(smollm2.config))
    with no_init_weights():  # drawing 135M random numbers takes longer than the rest of the test
        theirs = transformers.LlamaForCausalLM(config).eval()
    model = load_model(smollm2, dtype="float32", native=False)
    state = model.state_dict()
    names = {place.tensor: state[name] for name, place in places(smollm2.config).items()}
    theirs.load_state_dict(names | {"lm_head.weight": names["model.embed_tokens.weight"]}, assign=True)
    tokens = [1, 4093, 198, 504, 3575, 282, 4649, 314, 2, 198, 1, 520, 9531, 198]
    torch.testing.assert_close(logits(model, tokens), reference_logits(theirs, tokens), rtol=0, atol=1e-3)
