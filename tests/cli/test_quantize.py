"""``transect quantize``: what it writes is loaded here and in transformers, with the same logits."""

import json
import random

import gguf
import numpy as np
import pytest
import torch
from commands import run_here
from safetensors import safe_open
from tiny_llm import save_tiny_llm
from transformers.utils.quantization_config import AwqConfig, GPTQConfig

from transect.checkpoints.calibration import importance
from transect.checkpoints.gguf_out import _type_of
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.formats.gguf_file import GGUFFile
from transect.models.context import VarlenContext
from transect.models.quantized_layouts import codes_to_words, words_to_codes
from transect.text.tokenizer import Tokenizer
from transect.train.export.quantize import Calibration, windows_of
from transect.train.export.write import opened

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


@pytest.mark.parametrize(("name", "most"), [("fp8", 1 / 16), ("int8", 1 / 127), ("int4", 1 / 4)])
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


def logits_of_text(path, text):
    """``[T, V]``."""
    model = load_model(resolve(str(path)), dtype="float32", native=False)
    context = VarlenContext(torch.tensor([0, len(text)], dtype=torch.int32), model.ops)
    with torch.no_grad():
        found = model.logits(model(torch.tensor(text), context.positions(), context))
    return found


@pytest.fixture(scope="module")
def text(plain):
    """Bytes that are not alike: a text of one topic for calibration and another piece of it to judge by."""
    words = ["matrix", "scale", "group", "column", "of the", "error", "and a", "token", "which", "rounds"]
    draw = random.Random(0)
    lines = [" ".join(draw.choice(words) for _ in range(9)) for _ in range(120)]
    path = plain / "calibration.txt"
    path.write_text("\n".join(lines[:80]))
    return path, Tokenizer.from_hf(plain).encode("\n".join(lines[80:])[:250])


@pytest.mark.parametrize("name", ["int4", "gptq", "awq"])
def test_calibration_keeps_what_the_model_says(plain, text, tmp_path, name):
    """On other text the logits of a calibrated model are nearer to the model's than those of the nearest codes."""
    path, judged = text
    exact = logits_of_text(plain, judged)
    errors = []
    for number, more in enumerate(((), ("--calibrate", str(path), "--calibrate-tokens", "2048"))):
        out = tmp_path / str(number)
        done = run_here("quantize", str(plain), "-o", str(out), "--format", name, *more)
        assert done.returncode == 0, done.stderr
        errors.append(float((logits_of_text(out, judged) - exact).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_calibration_weighs_the_columns_of_gguf_files(text, tmp_path):
    """With a text the columns that it uses most are nearer: what the matrix says of such text is."""
    source, (path, _) = with_merges(tmp_path), text
    found = opened(str(source))
    model = load_model(found.source, dtype="float32", native=False)
    counts = importance(model, windows_of(found, Calibration(path, 2048)))
    errors = []
    for number, more in enumerate(((), ("--calibrate", str(path), "--calibrate-tokens", "2048"))):
        out = tmp_path / f"{number}.gguf"
        assert run_here("quantize", str(source), "-o", str(out), "--format", "q4_k", *more).returncode == 0
        rounded = load_model(resolve(str(out)), dtype="float32", native=False)
        names = ("layers.0.attention.q", "layers.0.attention.v", "layers.1.mlp.down")
        moved = [model.get_parameter(f"{n}.weight") - rounded.get_parameter(f"{n}.weight") for n in names]
        errors.append([float((counts[n] * m.square()).sum()) for n, m in zip(names, moved, strict=True)])
    assert all(weighed < nearest for nearest, weighed in zip(*errors, strict=True))


@pytest.mark.parametrize(("name", "keys"), [
    ("gptq", {"qweight": [8, 64], "qzeros": [1, 8], "scales": [1, 64], "g_idx": [64]}),
    ("awq", {"qweight": [64, 8], "qzeros": [1, 8], "scales": [1, 64]}),
])  # fmt: skip
def test_layouts_of_four_bits(tmp_path, name, keys):
    """Names and shapes of other programs' checkpoints, read back packed and as values alike; rows of 64 numbers make
    groups of 64 by themselves, and of 32 where that is asked for."""
    plain = tmp_path / "plain"
    plain.mkdir()
    save_tiny_llm(plain, intermediate_size=128)
    out = tmp_path / "out"
    assert run_here("quantize", str(plain), "-o", str(out), "--format", name).returncode == 0
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == name and settings["group_size"] == 64
    read = {"gptq": GPTQConfig, "awq": AwqConfig}[name].from_dict(settings)  # as transformers understands it
    assert (read.bits, read.group_size, str(read.quant_method.value)) == (4, 64, name)
    assert read.format == "gemm" if name == "awq" else read.sym and not read.desc_act
    with safe_open(out / "model.safetensors", "pt") as file:
        prefix = "model.layers.0.self_attn.q_proj."
        found = {key.removeprefix(prefix): file.get_slice(key).get_shape() for key in file.keys() if prefix in key}  # noqa: SIM118
    assert found == keys
    exact, rounded = logits(plain)[1], logits(out)[1]
    for key in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight"):
        weight = exact.get_parameter(key)
        error = (weight - rounded.get_parameter(key)).square().mean().sqrt()
        assert 0.02 < error / weight.std() < 0.12
    done = run_here("quantize", str(plain), "-o", str(tmp_path / "b"), "--format", name, "--group-size", "32")
    assert done.returncode == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]["group_size"] == 32


def read_by_the_book(folder, name, prefix):
    """A matrix ``[O, I]`` read word by word, as the descriptions of the two formats say, by none of our code."""
    with safe_open(folder / "model.safetensors", "np") as file:
        found = {key.removeprefix(f"{prefix}."): file.get_tensor(key) for key in file.keys() if prefix in key}  # noqa: SIM118
    words, zeros, scales = found["qweight"].view(np.uint32), found["qzeros"].view(np.uint32), found["scales"]
    groups, outputs = scales.shape
    if name == "gptq":  # eight rows of a column in a word, the first in the lowest bits; zeros less one
        assert (zeros == 0x77777777).all()  # kernels of symmetric checkpoints take the zero to be 8
        inputs = 8 * len(words)
        code, group = (lambda i, o: words[i // 8, o] >> 4 * (i % 8) & 15), found["g_idx"]
        zero = lambda g, o: (zeros[g, o // 8] >> 4 * (o % 8) & 15) + 1  # noqa: E731
    else:  # eight columns of a row in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on
        at = {column: 4 * place for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}
        inputs = len(words)
        code, group = (lambda i, o: words[i, o // 8] >> at[o % 8] & 15), np.arange(inputs) // (inputs // groups)
        zero = lambda g, o: zeros[g, o // 8] >> at[o % 8] & 15  # noqa: E731
    return np.array([
        [(int(code(i, o)) - int(zero(group[i], o))) * float(scales[group[i], o]) for i in range(inputs)]
        for o in range(outputs)
    ], np.float32)  # fmt: skip


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_another_reader_sees_the_same_values(tmp_path, name):
    plain, out = tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    save_tiny_llm(plain)
    assert run_here("quantize", str(plain), "-o", str(out), "--format", name, "--group-size", "32").returncode == 0
    ours = logits(out)[1].get_parameter("layers.1.attention.k.weight").detach().numpy()
    assert np.array_equal(read_by_the_book(out, name, "model.layers.1.self_attn.k_proj"), ours)


def with_merges(folder):
    """The tiny model with rows of 256 numbers and a tokenizer that GGUF files can hold."""
    source = folder / "source"
    source.mkdir()
    save_tiny_llm(source, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["el"] = 299
    tokenizer["model"]["merges"] = [["e", "l"]]
    tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["id"] < 299]
    path.write_text(json.dumps(tokenizer))
    return source


@pytest.mark.parametrize(("name", "types"), [
    ("q4_k_m", {"Q4_K", "Q6_K", "F32"}), ("q5_k", {"Q5_K", "Q6_K", "F32"}), ("q6_k", {"Q6_K", "F32"}),
])  # fmt: skip
def test_k_types(tmp_path, name, types):
    """Files of the K types, with the types of llama.cpp's mixtures; the logits are near."""
    source, out = with_merges(tmp_path), tmp_path / "m.gguf"
    assert run_here("quantize", str(source), "-o", str(out), "--format", name).returncode == 0
    found = GGUFFile.open(out)
    assert {tensor.type_name for tensor in found.tensors.values()} == types
    for theirs in gguf.GGUFReader(out).tensors:  # the reader of the gguf package sees the same values
        values = gguf.dequantize(theirs.data, theirs.tensor_type).reshape(found.tensors[theirs.name].shape)
        assert np.array_equal(values, found.tensors[theirs.name].dequantize()), theirs.name
    assert found.metadata["general.file_type"] == {"q4_k_m": 15, "q5_k": 16, "q6_k": 18}[name]
    exact, rounded = logits(source)[1], logits(out)[1]
    for key in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight", "head.weight"):
        weight = exact.get_parameter(key)
        error = (weight - rounded.get_parameter(key)).square().mean().sqrt()
        assert 0 < error / weight.std() < {"q4_k_m": 0.09, "q5_k": 0.045, "q6_k": 0.03}[name]


def test_rows_that_are_no_whole_blocks_take_smaller_ones(tmp_path):
    """Q5_0 stands in for Q4_K, which is what llama.cpp does."""
    assert _type_of("layers.0.mlp.up", (96, 64), "Q4_K_M", 8) == "Q5_0"
    assert _type_of("layers.0.mlp.down", (64, 256), "Q4_K_M", 8) == "Q6_K"
    assert _type_of("layers.0.mlp.down", (64, 96), "Q4_K_M", 8) == "Q8_0"
    assert _type_of("layers.0.mlp.up", (64, 48), "Q4_K", 8) == "F16"
    down = [_type_of(f"layers.{layer}.mlp.down", (64, 256), "Q4_K_M", 32) for layer in range(32)]
    assert [layer for layer, kind in enumerate(down) if kind == "Q6_K"] == [
        0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31,
    ]  # fmt: skip


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
        (plain, tmp_path / "a", "int3", "--format int3 cannot be written; choose one of fp8, int8, int4, awq, gptq"),
        (narrow, tmp_path / "b", "int4 --group-size 128", "cannot be cut into groups of 128; take fp8 or int8"),
        (plain, tmp_path / "c", "fp8 --group-size 64", "a group size is for int4, awq and gptq, not fp8"),
        (plain, tmp_path / "c", "int4 --group-size 48", "the group size must be 128, 64, 32, not 48"),
        (plain, tmp_path / "c", "int8 --calibrate pyproject.toml", "int8 rounds to the nearest"),
        (plain, tmp_path / "c", "q8_0 --calibrate pyproject.toml", "q8_0 rounds to the nearest"),
        (plain, tmp_path / "c", "AWQ --group-size 48", "the group size must be 128, 64, 32, not 48"),
        (plain, tmp_path / "c", "Q4_K_M --calibrate pyproject.toml --calibrate-tokens 512", "byte-level BPE"),
        (plain, tmp_path / "c", "int4 --calibrate nowhere.txt", "there is no file nowhere.txt"),
        (
            plain,
            tmp_path / "c",
            "int4 --calibrate pyproject.toml --calibrate-tokens 9",
            "not 9 tokens in windows of 512: give 512 tokens or more",
        ),
    ):
        done = run_here("quantize", str(source), "-o", str(output), "--format", *name.split())
        assert done.returncode == 2 and sentence in done.stderr


@pytest.mark.prove
@pytest.mark.parametrize("name", ["q4_k_m", "q6_k", "q4_0"])
def test_llama_cpp_reads_it(name, tmp_path):
    """Logits near ours: llama.cpp rounds activations to 8 bits for each product."""
    llama_cpp = pytest.importorskip("llama_cpp")
    out = tmp_path / "m.gguf"
    assert run_here("quantize", "smollm2-135m", "-o", str(out), "--format", name).returncode == 0
    theirs = llama_cpp.Llama(str(out), n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, logits_all=True)
    theirs.eval(TOKENS)
    want = torch.from_numpy(theirs.scores[: len(TOKENS)].copy())
    ours = logits(out)[0]
    assert (ours - want).abs().mean() < 0.1 * want.std()
