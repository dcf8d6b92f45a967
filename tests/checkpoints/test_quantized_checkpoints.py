"""Quantized checkpoints of other programs: written here code by code, read, served, and refused where damaged."""

import base64
import json
from types import SimpleNamespace

import pytest
import torch
from nf4_fixture import FILE, SHAPE, digest
from quantized_files import GROUP, awq, bitsandbytes, fp8, gptq, int8, packed, packed8
from safetensors.torch import load_file, save_file
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.checkpoints.hf import stored_hf
from transect.checkpoints.load import load_model
from transect.checkpoints.quantized_bnb import matrix
from transect.checkpoints.resolve import resolve
from transect.models.quantized_layouts import codes_to_words, gptq_zeros, mxfp4_values, spread
from transect.spec.hf import from_hf, from_hf_directory
from transect.spec.numbers.nf4 import CODES

Q = "model.layers.0.self_attn.q_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


FORMATS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq-act-order": (lambda w: gptq(w, True), {"quant_method": "gptq", "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "packed": (packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "packed-8": (packed8, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "packed-8-zeros": (lambda w: packed8(w, GROUP), {"quant_method": "compressed-tensors"}),
    "fp8-tensor": (lambda w: fp8(w, 999, 999), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8-channel": (lambda w: fp8(w, 1, 999), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8-block": (lambda w: fp8(w, 40, 40, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [40, 40]}),
    "nf4": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp4": (lambda w: bitsandbytes(w, nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
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


def test_values_of_bitsandbytes_itself():
    """What that program packed, and the digest of what it makes of it; also rows that begin within a block."""
    kept = json.loads(FILE.read_text())

    def tensor(name, dtype):
        return torch.frombuffer(bytearray(base64.b64decode(kept[name])), dtype=dtype)

    told = {"shape": SHAPE, "blocksize": 64, "nested_blocksize": 256}
    told["nested_offset"] = float(tensor("offset", torch.float32)[0])
    parts = {
        "m.weight": tensor("codes", torch.uint8)[:, None],
        "m.weight.absmax": tensor("scales", torch.uint8),
        "m.weight.nested_absmax": tensor("nested", torch.float32),
        "m.weight.nested_quant_map": tensor("map", torch.float32),
        "m.weight.quant_map": torch.tensor(CODES),
        f"m.{STATE}": torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8),
    }
    types = {torch.uint8: "U8", torch.float32: "F32"}
    file = SimpleNamespace(get_tensor=parts.get, get_slice=parts.get)
    found = {
        n: SimpleNamespace(file=file, path="f", name=n, shape=t.shape, dtype=types[t.dtype]) for n, t in parts.items()
    }
    shape, rows = matrix(found, "m.weight")
    assert shape == SHAPE and digest(rows(slice(None))) == kept["dense"]
    assert torch.equal(rows(slice(3, 77)), rows(slice(None))[3:77])


def test_zeros_of_gptq_that_borrow_from_their_neighbours():
    """GPTQModel, which transformers reads with, takes 1 from all eight zeros of a word at once."""
    zeros = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0))
    zeros[0], zeros[1] = 0, 15
    stored = codes_to_words(zeros) - 0x11111111
    assert torch.equal(gptq_zeros(stored), zeros.T.int())
    assert torch.equal(gptq_zeros(codes_to_words(zeros), 0), zeros.T.int())  # the second format


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
        ("gptq-act-order", lambda t: t[f"{Q}.g_idx"].fill_(99), r"q_proj\.g_idx' names groups that do not exist"),
        ("awq", lambda t: t.pop(f"{Q}.qzeros"), r"q_proj\.qzeros' is missing"),
        (
            "packed",
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :-1].clone()}),
            r"q_proj\.weight_scale",
        ),
        ("fp8-channel", lambda t: t.pop(f"{Q}.weight_scale"), r"q_proj\.weight_scale' is missing"),
        ("fp8-channel", lambda t: t.update({f"{Q}.weight_scale": torch.ones(3, 3, 3)}), r"q_proj\.weight_scale"),
        ("int8", lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(64, 1)}), "quantized symmetrically"),
        ("fp8-tensor", lambda t: t[f"{Q}.weight_scale"].fill_(torch.inf), r"scales of '.*q_proj\.weight'"),
        ("nf4", lambda t: t.pop(f"{Q}.weight.absmax"), r"q_proj\.weight\.absmax' is missing"),
        ("nf4", lambda t: t.pop(f"{Q}.{STATE}"), r"bitsandbytes__nf4' is missing"),
        ("nf4", lambda t: t[f"{Q}.{STATE}"].fill_(65), r"bitsandbytes__nf4' does not say a matrix's shape"),
        ("nf4", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:-1]}), r"q_proj\.weight' should have \d+ numbers"),
        ("fp4", lambda t: t[f"{Q}.weight.absmax"].fill_(torch.nan), r"scales of '.*q_proj\.weight' hold infinite"),
        (
            "awq",
            lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].flatten()}),
            r"q_proj\.qweight' of shape .* not a matrix",
        ),
        ("packed", lambda t: t.update({f"{Q}.weight_shape": torch.ones(2, 2)}), r"weight_shape says \[1, 1, 1, 1\]"),
    ],
)
def test_damage_is_named(checkpoints, tmp_path, name, change, sentence):
    folder = damaged(checkpoints[name][0], tmp_path, change)
    with pytest.raises(ValueError, match=sentence) as caught:
        load_model(resolve(str(folder)), dtype="float32", native=False)
    assert str(folder / "model.safetensors") in str(caught.value)


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


def test_scales_that_divide_no_matrix_are_refused() -> None:
    assert spread(torch.ones(2, 1), 128, 64).shape == (128, 64)
    assert spread(torch.ones(2, 2), 130, 200, (128, 128)).shape == (130, 200)  # blocks may be cut off
    for shape, block in (((3, 1), None), ((2, 3), None), ((3, 2), (128, 128))):
        with pytest.raises(ValueError, match="do not fit a matrix"):
            spread(torch.ones(shape), 128, 64, block)


def test_layouts_of_compressed_tensors_that_are_not_read_are_named(plain):
    config = json.loads((plain / "config.json").read_text())
    for settings in ({"format": "nvfp4-pack-quantized"}, {"config_groups": {"g": {"format": "nvfp4-pack-quantized"}}}):
        settings = {"quantization_config": settings | {"quant_method": "compressed-tensors"}}
        with pytest.raises(
            ValueError, match="format 'nvfp4-pack-quantized', which is not supported; supported are: de"
        ):
            from_hf(config | settings)
