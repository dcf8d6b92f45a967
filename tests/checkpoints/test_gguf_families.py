"""GGUF files of every family: the configuration and the weights of the safetensors of the same model, both ways."""

import dataclasses
import types

import gguf
import numpy as np
import pytest
import torch
from tiny_checkpoints import make_model, save_mxfp4, write_gguf

from transect.checkpoints.gguf import stored_gguf
from transect.checkpoints.gguf_out import gguf_metadata, gguf_tensors
from transect.checkpoints.hf import stored_hf
from transect.checkpoints.kernel_choice import in_blocks, kernels
from transect.checkpoints.layouts import held_layouts
from transect.checkpoints.load import fill, load_model, stored_weights
from transect.checkpoints.resolve import resolve
from transect.formats.ggml_blocks import QuantizedTensor
from transect.formats.gguf_file import GGUFFile
from transect.formats.gguf_write import write_gguf as write
from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.models.native import NativeStack, refusal
from transect.models.stored import read_all
from transect.models.weights.kinds import kinds_for
from transect.spec.families.registry import families
from transect.spec.gguf import from_gguf
from transect.spec.hf import from_hf_directory

FOUR = {"num_hidden_layers": 4}
EVERY_FOURTH = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
GRANTED = {
    "qwen2_moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": ["sliding_attention"] * 2},
    "smollm3": EVERY_FOURTH,
    "llama4_text": EVERY_FOURTH | {"moe_layers": [0, 1, 2, 3], "attention_chunk_size": 8192, "floor_scale": 8192,
                                   "attn_scale": 0.1},
}  # fmt: skip
"""Settings that llama.cpp takes for granted, where tiny models have others."""
FAMILIES = {name: GRANTED.get(name, {}) for name, record in families().items() if record.gguf}


def open_with_config(path):
    file = GGUFFile.open(path)
    return file, from_gguf(file.metadata, file.tensors)


@torch.no_grad()
def logits(model, device="cpu"):
    tokens = torch.randint(3, 96, (20,), generator=torch.Generator().manual_seed(1)).to(device)
    context = VarlenContext(torch.tensor([0, 20], dtype=torch.int32, device=device), model.ops)
    return model.logits(model(tokens, context.positions(), context)).float()


def same(got, expected, **bounds):
    assert set(got) == set(expected)
    for name, weight in got.items():
        dense = torch.from_numpy(weight.dequantize()) if isinstance(weight, QuantizedTensor) else weight
        torch.testing.assert_close(dense.float(), expected[name].float(), **{"rtol": 0, "atol": 2e-7} | bounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_the_model_of_its_safetensors_converted_and_written(tmp_path, family):
    model = make_model(family, **FAMILIES[family])
    model.save_pretrained(tmp_path)
    config = from_hf_directory(tmp_path)
    expected = dict(read_all(stored_hf(tmp_path, config)))
    converted, got = open_with_config(write_gguf(tmp_path / "converted.gguf", model))
    assert got == config
    same(dict(read_all(stored_gguf(converted, got))), expected)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
    metadata = gguf_metadata(config, "F32", "m") | {f"tokenizer.ggml.{key}": token for key, token in ids.items()}
    weights = stored_hf(tmp_path, config)
    write(tmp_path / "written.gguf", metadata, gguf_tensors(weights, config, "F32"))
    written, got = open_with_config(tmp_path / "written.gguf")
    assert got == config
    same(dict(read_all(stored_gguf(written, got))), expected)
    there = {tensor.name: tuple(tensor.shape) for tensor in gguf.GGUFReader(tmp_path / "written.gguf").tensors}
    assert there == {tensor.name: tuple(tensor.shape) for tensor in gguf.GGUFReader(converted.path).tensors}


def test_a_router_of_one_row_may_be_a_matrix(tmp_path):
    """The converter writes a matrix of one row; ``llama-quantize`` makes a vector of it."""
    model = make_model("qwen2_moe", mlp_only_layers=[])

    def row(name, array):
        return array[None] if name.endswith("ffn_gate_inp_shexp.weight") else array

    files = [write_gguf(tmp_path / f"{number}.gguf", model, change=change) for number, change in enumerate((None, row))]
    vector, matrix = (dict(read_all(stored_gguf(*open_with_config(path)))) for path in files)
    same(matrix, vector, atol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "phi3"])
def test_packed_experts_and_joined_matrices_stay_packed(tmp_path, family):
    model = make_model(family)
    file, config = open_with_config(write_gguf(tmp_path / "m.gguf", model, "Q8_0"))
    model.save_pretrained(tmp_path)
    expected = dict(read_all(stored_hf(tmp_path, from_hf_directory(tmp_path))))
    weights = dict(stored_gguf(file, config))
    part = "mlp.experts_up" if family == "qwen3_moe" else "mlp.up"
    stored = weights[f"layers.1.{part}.weight"]
    assert stored.layout.units.name == "Q8_0"
    rows, whole = stored.read(slice(5, 40)), expected[f"layers.1.{part}.weight"]
    np.testing.assert_allclose(rows.dequantize(), whole[5:40].numpy(), atol=0.01 * float(whole.abs().max()))
    assert stored.codes(slice(5, 40), slice(None)).blocks.shape == (35, 2 * 34)


def test_experts_in_mxfp4_are_copied(tmp_path):
    save_mxfp4(tmp_path)
    config = from_hf_directory(tmp_path)
    weights = stored_hf(tmp_path, config)
    write(tmp_path / "m.gguf", gguf_metadata(config, "Q8_0", "m"), gguf_tensors(weights, config, "Q8_0"))
    file, got = open_with_config(tmp_path / "m.gguf")
    assert file.tensors["blk.0.ffn_up_exps.weight"].type_name == "MXFP4"
    assert file.tensors["blk.0.attn_q.weight"].type_name == "Q8_0"
    assert (
        file.tensors["blk.0.ffn_gate_inp.weight"].type_name == file.tensors["blk.0.ffn_up_exps.bias"].type_name == "F32"
    )
    expected = dict(read_all(stored_hf(tmp_path, config)))
    experts = {name: w for name, w in read_all(stored_gguf(file, got)) if "experts" in name}
    same(experts, {name: expected[name] for name in experts}, atol=0)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "llama4_text"])
def test_logits_are_those_of_transformers_by_products_on_the_files_blocks(tmp_path, family):
    model = make_model(family, **FAMILIES[family])
    source = resolve(str(write_gguf(tmp_path / "m.gguf", model, "Q8_0")))
    loaded = [load_model(source, dtype="float32", native=native) for native in (None, False)]
    formats = [dict(ours.weights())["layers.1.attention.q"].format.name for ours in loaded]
    assert formats == ["Q8_0", "dense 32-bit"]
    with torch.no_grad():
        for name, weight in loaded[1].weights():  # the values that the file's blocks stand for
            if weight.format.name.startswith("dense"):
                assert torch.equal(dict(loaded[0].weights())[name].dense(), weight.dense())
    assert kernels(source.config, blocks=in_blocks(source))[1].endswith(f"({refusal(source.config, 16)})")
    tokens = torch.randint(3, 96, (20,), generator=torch.Generator().manual_seed(1))
    context = VarlenContext(torch.tensor([0, 20], dtype=torch.int32), loaded[1].ops)
    packed, dense = (ours.logits(ours(tokens, torch.arange(20), context)) for ours in loaded)
    torch.testing.assert_close(packed, dense, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    assert float((packed - expected).abs().mean()) < 0.05 * float(expected.std())


@pytest.mark.parametrize(
    ("family", "widths"),
    [
        ("mixtral", {"intermediate_size": 32}),
        ("qwen2_moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}),
        ("dots1", {"moe_intermediate_size": 32}),
        ("olmoe", {}),
        ("gpt_oss", {}),
    ],
)
def test_a_call_for_all_layers_has_the_experts_of_a_file(tmp_path, family, widths):
    source = resolve(str(write_gguf(tmp_path / "m.gguf", make_model(family, **FAMILIES[family] | widths), "Q8_0")))
    model = load_model(source, dtype="float32")
    assert isinstance(model.stack, NativeStack)
    caches = model.new_kv_cache(2, 16, torch.float32)
    table, starts, length = (torch.tensor(each, dtype=torch.int32) for each in ([[1, 0]], [0, 20], [20]))
    tokens = torch.randint(3, 96, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = model.logits(model(tokens, torch.arange(20), PagedContext(*caches, table, starts, length)))
    torch.testing.assert_close(got, logits(load_model(source, dtype="float32", native=False)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_oss", "phi3"])
def test_kinds_of_weight_for_a_gpu_hold_the_blocks(tmp_path, family):
    source = resolve(str(write_gguf(tmp_path / "m.gguf", make_model(family), "Q8_0")))
    kinds = kinds_for(None, "cpu", layouts=held_layouts(source))
    model = fill(Decoder(source.config, "cpu", torch.float32, kinds=kinds), stored_weights(source))
    assert {weight.format.name for name, weight in model.weights() if name.startswith("layers.")} == {"Q8_0"}
    torch.testing.assert_close(logits(model), logits(load_model(source, dtype="float32", native=False)))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_the_logits_are_those_of_the_file(tmp_path, family):
    source = resolve(str(write_gguf(tmp_path / "m.gguf", make_model(family, **FAMILIES[family]), "Q8_0")))
    wanted = logits(load_model(source, dtype="float32", native=False))
    got = logits(load_model(source, device="cuda"), "cuda").cpu()
    assert float((got - wanted).norm() / wanted.norm()) < 0.05


def refuses(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        source = resolve(str(path))
        dict(read_all(stored_gguf(source.gguf, source.config)))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_read_is_said(tmp_path):
    path = tmp_path / "m.gguf"
    olmo, moe, phi = make_model("olmo2"), make_model("qwen3_moe"), make_model("phi3")
    refuses(write_gguf(path, olmo, metadata={"sliding_window": 5}), "OLMo 3, whose layers slide")
    refuses(write_gguf(path, moe, metadata={"expert_gating_func": types.SimpleNamespace(value=3)}), "router of kind 3")
    flat = dict.fromkeys(["blk.0.ffn_up_exps.weight"], None)
    refuses(
        write_gguf(path, moe, change=lambda name, array: array.reshape(-1, 64) if name in flat else array),
        "names 6 experts, and the file has no tensor 'blk.0.ffn_up_exps.weight' of three dimensions",
    )
    refuses(
        write_gguf(path, moe, change=lambda n, array: array[:-1] if n == "blk.1.ffn_up_exps.weight" else array),
        r"'blk.1.ffn_up_exps.weight' should have shape \[6, 24, 64\] and has \[5, 24, 64\]",
    )
    refuses(
        write_gguf(path, phi, change=lambda n, array: array[:-1] if n == "blk.1.attn_qkv.weight" else array),
        r"'blk.1.attn_qkv.weight' should have shape \[128, 64\] and has \[127, 64\]",
    )


def test_names_that_damage_broke_are_shown_in_one_line(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", make_model("llama-bias"))
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.bias", b"blk\n0.attn_q.bias"))
    file, config = open_with_config(path)
    with pytest.raises(ValueError, match=r"no use for .* \('blk\\n0.attn_q.bias', ") as caught:
        stored_gguf(file, dataclasses.replace(config, qkv_bias=False))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 9}, "gemma2 model with scores scaled by other than 0.25 cannot"),
        ("smollm3", {}, "smollm3 model with other layers that rotate than three of four cannot"),
        ("qwen2_moe", {}, "qwen2_moe model with layers without experts cannot"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, "a sliding window cannot"),
    ],
)
def test_what_llama_cpp_takes_otherwise_is_not_written(tmp_path, family, changes, message):
    make_model(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        gguf_metadata(from_hf_directory(tmp_path), "F32", "m")


def test_a_mistral_whose_layers_take_turns_is_not_written(tmp_path):
    """llama.cpp reads one window for all layers of a llama."""
    make_model("mistral").save_pretrained(tmp_path)
    config = from_hf_directory(tmp_path)
    assert gguf_metadata(config, "F16", "m")["llama.attention.sliding_window"] == 9
    with pytest.raises(ValueError, match="a sliding window of some layers cannot"):
        gguf_metadata(dataclasses.replace(config, full_attention_layers=(0,)), "F16", "m")
