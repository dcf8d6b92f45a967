"""Quantized checkpoints of other programs: written here code by code, read, served, and refused where damaged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.models.config_hf import from_hf_directory
from transect.models.load import load_model
from transect.models.quantized_layouts import mxfp4_values
from transect.models.resolve import resolve
from transect.models.weights_hf import stored_hf

GROUP = 16
Q = "model.layers.0.self_attn.q_proj"


def word(codes):
    """Eight codes as an int32, the first in the lowest bits."""
    number = sum(int(code) << (4 * place) for place, code in enumerate(codes))
    return number - 2**32 if number >= 2**31 else number


def groups_of(inputs, order):
    """The group of each input; with act-order they are shuffled."""
    group = torch.arange(inputs) // GROUP
    return group[torch.randperm(inputs, generator=torch.Generator().manual_seed(7))] if order else group


def four_bits(weight, group):
    """(codes, zeros, scales, values): asymmetric, ``[O, I]`` and ``[O, G]``."""
    count = int(group.max()) + 1
    codes = torch.zeros_like(weight, dtype=torch.int64)
    zeros = torch.zeros(len(weight), count, dtype=torch.int64)
    scales = torch.zeros(len(weight), count)
    for g in range(count):
        part = weight[:, group == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / 15).clamp(min=1e-3).half().float()
        zeros[:, g] = (-low / scales[:, g]).round().clamp(1, 15)
        codes[:, group == g] = (part / scales[:, g, None] + zeros[:, g, None]).round().clamp(0, 15).long()
    values = (codes - zeros[:, group]).float() * scales[:, group]
    return codes, zeros, scales, values


def gptq(weight, order=False):
    group = groups_of(weight.shape[1], order)
    codes, zeros, scales, values = four_bits(weight, group)
    outputs, inputs = weight.shape
    qweight = [[word(codes[o, i : i + 8]) for o in range(outputs)] for i in range(0, inputs, 8)]
    qzeros = [[word(zeros[o : o + 8, g] - 1) for o in range(0, outputs, 8)] for g in range(zeros.shape[1])]
    return values, {
        "qweight": torch.tensor(qweight, dtype=torch.int32), "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": scales.T.contiguous().half(), "g_idx": group.int(),
    }  # fmt: skip


def awq(weight):
    codes, zeros, scales, values = four_bits(weight, groups_of(weight.shape[1], False))
    outputs, inputs = weight.shape
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight = [[word([codes[o + p, i] for p in order]) for o in range(0, outputs, 8)] for i in range(inputs)]
    qzeros = [[word([zeros[o + p, g] for p in order]) for o in range(0, outputs, 8)] for g in range(zeros.shape[1])]
    return values, {
        "qweight": torch.tensor(qweight, dtype=torch.int32), "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": scales.T.contiguous().half(),
    }  # fmt: skip


def packed(weight):
    scales = (weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).bfloat16()
    wide = scales.float().repeat_interleave(GROUP, 1)
    codes = (weight / wide).round().clamp(-8, 7).long()
    words = [[word(row[i : i + 8] + 8) for i in range(0, len(row), 8)] for row in codes]
    return codes * wide, {
        "weight_packed": torch.tensor(words, dtype=torch.int32), "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip


def fp8(weight, rows, columns, name="weight_scale"):
    """A scale for each block of ``rows`` by ``columns``; at the ends blocks are cut off."""
    outputs, inputs = weight.shape
    scale = torch.zeros(-(-outputs // rows), -(-inputs // columns))
    values, codes = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            block = (slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
            scale[r, c] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scale[r, c]).to(torch.float8_e4m3fn)
            values[block] = codes[block].float() * scale[r, c]
    return values, {"weight": codes, name: scale.reshape(1) if scale.numel() == 1 else scale}


def int8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return codes.float() * scale, {"weight": codes, "weight_scale": scale}


FORMATS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq-act-order": (lambda w: gptq(w, True), {"quant_method": "gptq", "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "packed": (packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "fp8-tensor": (lambda w: fp8(w, 999, 999), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8-channel": (lambda w: fp8(w, 1, 999), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8-block": (lambda w: fp8(w, 40, 40, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [40, 40]}),
    "int8": (int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    save_tiny_llm(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(plain, tmp_path_factory):
    """Folder and expected values of each format; the head and one layer's ``down_proj`` are left as they were."""
    made = {}
    for name, (quantize, settings) in FORMATS.items():
        folder, tensors, values = tmp_path_factory.mktemp(name), {}, {}
        for tensor, weight in load_file(plain / "model.safetensors").items():
            if "_proj" in tensor and "layers.1.mlp.down" not in tensor:
                values[tensor], parts = quantize(weight.float())
                tensors |= {f"{tensor.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
            else:
                tensors[tensor] = weight
        save_file(tensors, folder / "model.safetensors")
        for file in plain.glob("*.json"):
            (folder / file.name).write_text(file.read_text())
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
        (folder / "config.json").write_text(json.dumps(config))
        made[name] = folder, values
    return made


def read(folder):
    return dict(stored_hf(folder, from_hf_directory(folder)))


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_that_were_written(checkpoints, name):
    folder, values = checkpoints[name]
    model = load_model(resolve(str(folder)), dtype="float32", native=False)
    for layer in range(2):
        for ours, theirs in (
            ("attention.q", "self_attn.q_proj"),
            ("mlp.down", "mlp.down_proj"),
            ("mlp.up", "mlp.up_proj"),
        ):
            want = values.get(f"model.layers.{layer}.{theirs}.weight")
            if want is not None:
                torch.testing.assert_close(
                    model.get_parameter(f"layers.{layer}.{ours}.weight"), want, rtol=0, atol=1e-6
                )


@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_parts_of_the_whole(checkpoints, name):
    """Rows and columns that a shard reads, also such as cut through a word or a block."""
    stored = stored_hf(checkpoints[name][0], from_hf_directory(checkpoints[name][0]))
    for key, each in stored:
        if key == "layers.0.mlp.gate.weight":
            whole = each.read()
            assert torch.equal(each.read(slice(12, 45)), whole[12:45])
            assert torch.equal(each.read(slice(32, 64), slice(16, 48)), whole[32:64, 16:48])
            break
    stored.close()


@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-block"])
def test_served(checkpoints, name):
    """Through ``LLM``, on the kernels that run here, the tokens of the values."""
    folder, _ = checkpoints[name]
    llm = LLM(str(folder), dtype="float32", device="cpu")
    answer = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0]
    llm.close()
    model = load_model(resolve(str(folder)), dtype="float32", native=False)
    from transect.models.context import VarlenContext

    tokens = [5, 6, 7]
    for _ in range(6):
        context = VarlenContext(torch.tensor([0, len(tokens)], dtype=torch.int32), model.ops)
        with torch.no_grad():
            tokens.append(int(model.logits(model(torch.tensor(tokens), context.positions(), context))[-1].argmax()))
    assert list(answer.outputs[0].token_ids) == tokens[3:]


def test_mxfp4_is_that_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), generator=generator, dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(mxfp4_values(blocks, scales).mT, want)


def damaged(folder, target, change):
    for file in folder.glob("*.json"):
        (target / file.name).write_text(file.read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("gptq", lambda t: t.pop(f"{Q}.scales"), r"q_proj\.scales' is missing"),
        ("gptq", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:-1]}), r"q_proj\.scales' should have shape"),
        ("gptq", lambda t: t[f"{Q}.scales"].fill_(torch.nan), r"scales of '.*q_proj\.weight' hold infinite or NaN"),
        ("gptq-act-order", lambda t: t[f"{Q}.g_idx"].fill_(99), r"q_proj\.g_idx' names groups that are not there"),
        ("awq", lambda t: t.pop(f"{Q}.qzeros"), r"q_proj\.qzeros' is missing"),
        (
            "packed",
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :-1].clone()}),
            r"q_proj\.weight_scale",
        ),
        ("fp8-channel", lambda t: t.pop(f"{Q}.weight_scale"), r"q_proj\.weight_scale' is missing"),
        ("fp8-channel", lambda t: t.update({f"{Q}.weight_scale": torch.ones(3, 3, 3)}), r"q_proj\.weight_scale"),
        ("fp8-tensor", lambda t: t[f"{Q}.weight_scale"].fill_(torch.inf), r"scales of '.*q_proj\.weight'"),
    ],
)
def test_damage_is_named(checkpoints, tmp_path, name, change, sentence):
    folder = damaged(checkpoints[name][0], tmp_path, change)
    with pytest.raises(ValueError, match=sentence):
        load_model(resolve(str(folder)), dtype="float32", native=False)


def test_a_wrong_group_size_and_a_cut_file(checkpoints, tmp_path):
    folder = damaged(checkpoints["awq"][0], tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"qzeros' should have shape .* group size"):
        read(folder)
    config["quantization_config"]["group_size"] = GROUP
    (folder / "config.json").write_text(json.dumps(config))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        read(folder)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_rounded_when_loaded(plain, quantization):
    """``quantization`` keeps the layers in 8 bits, says so, and stays near the plain logits; the head is as it was."""
    llm = LLM(str(plain), dtype="float32", device="cpu", quantization=quantization)
    try:
        assert quantization in llm.kernels
        answer = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
    finally:
        llm.close()
    assert len(answer.outputs[0].token_ids) == 4
    source = resolve(str(plain))
    exact, rounded = (load_model(source, dtype="float32", native=False, quantization=q) for q in (None, quantization))
    assert torch.equal(exact.head.weight, rounded.head.weight)
    layer = rounded.layers[0].mlp.up
    assert layer.format.name == quantization and 8 <= layer.format.bits < 8.6
    assert rounded.nbytes < 0.6 * exact.nbytes
