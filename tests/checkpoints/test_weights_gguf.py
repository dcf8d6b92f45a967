"""GGUF weights: the same tensors as the safetensors of the same model, and a sentence for each thing that is wrong."""

import dataclasses

import gguf
import numpy as np
import pytest
import torch
from tiny_checkpoints import make_model, write_gguf

from transect.checkpoints.gguf import half_rotation_rows, stored_gguf
from transect.checkpoints.resolve import resolve
from transect.formats.ggml_blocks import QuantizedTensor
from transect.formats.gguf_file import GGUFFile
from transect.models.stored import read_all
from transect.spec.gguf import from_gguf
from transect.spec.weights import weight_shapes


def open_with_config(path):
    file = GGUFFile.open(path)
    return file, from_gguf(file.metadata, file.tensors)


def dense(weight):
    return torch.from_numpy(weight.dequantize()) if isinstance(weight, QuantizedTensor) else weight


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_packed_matrices_stay_packed_and_reordered_alike(tmp_path, family, type_name):
    model = make_model(family)
    file, config = open_with_config(write_gguf(tmp_path / "m.gguf", model, type_name))
    reference = dict(read_all(stored_gguf(*open_with_config(write_gguf(tmp_path / "f.gguf", model)))))
    steps = {"Q8_0": 0.01, "Q4_1": 0.15, "F16": 1e-3, "BF16": 1e-2}
    for name, weight in read_all(stored_gguf(file, config)):
        if len(weight.shape) == 2:
            kind = weight.type_name if isinstance(weight, QuantizedTensor) else weight.dtype
            assert kind == {"F16": torch.float16, "BF16": torch.bfloat16}.get(type_name, type_name)
        torch.testing.assert_close(
            dense(weight).float(), reference[name], rtol=0, atol=steps[type_name] * float(reference[name].abs().max())
        )


def test_rows_of_one_head_are_unpaired():
    np.testing.assert_array_equal(half_rotation_rows(2, 6), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11])


def test_rope_frequencies_are_no_superfluous_tensor(tmp_path):
    model = make_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    for key, value in GGUFFile.open(path).metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, reader.fields[key].types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(dict(read_all(stored_gguf(*open_with_config(tmp_path / "f.gguf"))))) == len(reader.tensors)


def refuses(path, message):
    file, config = open_with_config(path)
    with pytest.raises(ValueError, match=message) as caught:
        read_all(stored_gguf(file, config))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_missing_wrong_and_superfluous_tensors(tmp_path):
    model = make_model("llama")
    path = tmp_path / "m.gguf"
    refuses(
        write_gguf(path, model, leave_out=["blk.1.ffn_up.weight"]),
        r"'blk.1.ffn_up.weight' \(shape \[96, 64\]\) is missing",
    )
    write_gguf(path, model, change=lambda name, a: a[:-1] if name == "blk.0.attn_k.weight" else a)
    refuses(path, r"'blk.0.attn_k.weight' should have shape \[32, 64\] and has \[31, 64\]")
    biased = make_model("llama-bias")
    refuses(write_gguf(path, biased, leave_out=["blk.0.attn_q.bias"]), "no use for .* of the tensors")


def test_an_absurd_number_of_layers_is_refused_at_once(tmp_path):
    file, config = open_with_config(write_gguf(tmp_path / "m.gguf", make_model("llama")))
    with pytest.raises(ValueError, match="21 tensors cannot be the 4096 layers"):
        read_all(stored_gguf(file, dataclasses.replace(config, n_layers=4096)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_random_damage_never_makes_anything_but_a_value_error(tmp_path, family):
    path = write_gguf(tmp_path / "m.gguf", make_model(family), "Q8_0")
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    header = bytes(whole).rindex(b"output") + 64
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        data = whole.copy()
        for at in rng.integers(0, header, rng.integers(1, 3)):
            data[at] = rng.choice([0, 1, 0x7F, 0xFF, data[at] ^ (1 << rng.integers(8)), rng.integers(256)])
        path.write_bytes(data.tobytes())
        try:
            source = resolve(str(path))
            weights = dict(read_all(stored_gguf(source.gguf, source.config)))
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert {name: tuple(weight.shape) for name, weight in weights.items()} == weight_shapes(source.config)
    assert refused > 100


@pytest.mark.parametrize("type_name, name", [("Q8_0", "blk.0.attn_q.weight"), ("F32", "output_norm.weight")])
def test_numbers_that_are_not_finite(tmp_path, type_name, name):
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), type_name)
    tensor = GGUFFile.open(path).tensors[name]
    data = bytearray(path.read_bytes())
    at = bytes(data).index(tensor.blocks.tobytes())
    data[at : at + 4] = b"\x00\x7c\x80\x7f"  # infinite as float16 (its first two bytes) and as float32
    path.write_bytes(data)
    file, config = open_with_config(path)
    with pytest.raises(ValueError, match=f"{name}' holds infinite or NaN"):
        dict(read_all(stored_gguf(file, config)))


def test_the_real_model_is_whole(smollm2):
    weights = dict(read_all(stored_gguf(smollm2.gguf, smollm2.config)))
    shapes = weight_shapes(smollm2.config)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    assert weights["embed.weight"].type_name == "Q8_0"
    assert weights["layers.29.mlp.down.weight"].type_name == "Q4_1"
    order = half_rotation_rows(9, 64)
    np.testing.assert_array_equal(
        weights["layers.3.attention.q.weight"].dequantize(),
        smollm2.gguf.tensors["blk.3.attn_q.weight"].dequantize()[order],
    )
