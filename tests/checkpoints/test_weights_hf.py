"""Safetensors in and out: against transformers both ways, sharded and not, and a sentence for each kind of damage."""

import dataclasses
import json

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, make_model

from transect.checkpoints.hf import stored_hf
from transect.checkpoints.hf_out import save_hf
from transect.models.stored import read_all
from transect.spec.hf import from_hf, from_hf_directory
from transect.spec.weights import weight_shapes


def read(directory):
    return dict(read_all(stored_hf(directory, from_hf_directory(directory))))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A directory as transformers saves it."""
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(directory)
    return directory


def copied(source, target, change=None):
    """A copy of a checkpoint; ``change`` works on its tensors."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True])
def test_round_trip_through_transformers(tmp_path, family, sharded):
    model = make_model(family)
    model.save_pretrained(tmp_path / "theirs", **({"max_shard_size": "40KB"} if sharded else {}))
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == sharded
    config = from_hf_directory(tmp_path / "theirs")
    state = read(tmp_path / "theirs")
    assert {name: tuple(weight.shape) for name, weight in state.items()} == weight_shapes(config)
    if family != "gpt2":
        assert torch.equal(
            state["layers.1.attention.k.weight"], model.state_dict()["model.layers.1.self_attn.k_proj.weight"]
        )
    save_hf(state, config, tmp_path / "ours", max_shard_bytes=40_000 if sharded else 10**9)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == sharded
    back = read(tmp_path / "ours")
    assert all(torch.equal(back[name], weight) for name, weight in state.items()) and back.keys() == state.keys()
    assert from_hf_directory(tmp_path / "ours") == config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_saving_over_an_older_model_leaves_nothing_of_it(tmp_path, llama):
    config, state = from_hf_directory(llama), read(llama)
    save_hf(state, config, tmp_path, max_shard_bytes=40_000)
    save_hf({name: weight.to(torch.bfloat16) for name, weight in state.items()}, config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert all(weight.dtype == torch.bfloat16 for weight in read(tmp_path).values())


def test_what_cannot_be_saved(tmp_path, llama):
    config, state = from_hf_directory(llama), read(llama)
    with pytest.raises(ValueError, match="no weights extra"):
        save_hf(state | {"extra": torch.ones(1)}, config, tmp_path)
    with pytest.raises(ValueError, match=r"'norm.weight' should have shape \[64\] and has \[3\]"):
        save_hf(state | {"norm.weight": torch.ones(3)}, config, tmp_path)
    with pytest.raises(ValueError, match=r"'head.weight' \(shape \[96, 64\]\) is missing"):
        save_hf({name: w for name, w in state.items() if name != "head.weight"}, config, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the model to"):
        save_hf(state, config, tmp_path / "file")


def test_names_without_their_first_part_and_other_file_names(tmp_path, llama):
    def bare(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    copied(llama, tmp_path, bare)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert read(tmp_path).keys() == read(llama).keys()


def test_a_second_copy_of_tied_embeddings_and_old_buffers_are_ignored(tmp_path, llama):
    def clutter(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    copied(llama, tmp_path, clutter)
    assert read(tmp_path).keys() == read(llama).keys()
    config = dataclasses.replace(from_hf_directory(llama), tied_embeddings=True)
    assert "head.weight" not in dict(read_all(stored_hf(tmp_path, config)))


def refuses(directory, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_all(stored_hf(directory, from_hf_directory(directory)))
    assert "\n" not in str(caught.value) and str(directory) in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.norm.weight"), r"'model.norm.weight' \(shape \[64\]\) is missing"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' .* is missing"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(95, 64)}),
            r"'lm_head.weight' should have shape \[96, 64\] and has \[95, 64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "'model.norm.weight' is of unsupported type I8; supported: F64, F32",
        ),
        (lambda t: t.update({"score.weight": torch.ones(2)}), r"no use for 1 of the tensors \(score.weight\)"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "no use for 1 of the tensors",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_configuration(tmp_path, llama, change, message):
    refuses(copied(llama, tmp_path, change), message)


def test_an_absurd_number_of_layers_is_refused_at_once(llama):
    config = dataclasses.replace(from_hf_directory(llama), n_layers=4096)
    with pytest.raises(ValueError, match=r"21 tensors cannot be the 4096 layers of config.json"):
        read_all(stored_hf(llama, config))


def test_missing_files(tmp_path, llama):
    copied(llama, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refuses(tmp_path, "has neither model.safetensors nor model.safetensors.index.json; download the model again")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuses(tmp_path, "PyTorch .bin files, which are not read")
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        refuses(tmp_path, "is not a readable index")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    refuses(tmp_path, r"lacks 1 of 1 shards \(b.safetensors\)")


def test_a_tensor_in_two_shards(tmp_path, llama):
    copied(llama, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "b.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(tmp_path, "'model.norm.weight' is in two files")


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_random_damage_never_makes_anything_but_a_value_error(tmp_path, llama, data):
    whole = (llama / "model.safetensors").read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    if data.draw(st.booleans(), "truncate"):
        damaged = whole[: data.draw(st.one_of(st.integers(0, header + 9), st.integers(0, len(whole) - 1)), "length")]
    else:
        changed = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.one_of(st.integers(0, 15), st.integers(0, header - 1)), "at")
            changed[at] = data.draw(st.integers(0, 255), "byte")
        damaged = bytes(changed)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(damaged)
    config = from_hf_directory(llama)
    try:
        weights = dict(read_all(stored_hf(tmp_path, config)))
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert len(damaged) == len(whole)
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == weight_shapes(config)


def as_a_part(text, directory, name):
    """Write a language model inside of one that also sees, as the hub has them: ``name`` is where in it."""
    text.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "generation_config.json").unlink(missing_ok=True)
    whole = {"model_type": "one that sees", "text_config": config, "vision_config": {"hidden_size": 8}}
    whole |= {"eos_token_id": [1, 7], "tie_word_embeddings": config.pop("tie_word_embeddings")}
    config.pop("eos_token_id")
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = {name(key): tensor for key, tensor in load_file(directory / "model.safetensors").items()}
    tensors |= {"vision_tower.conv.weight": torch.ones(2, 2), "multi_modal_projector.linear.weight": torch.ones(2, 2)}
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma3_text", lambda key: f"language_model.{key}"),
        ("gemma3_text", lambda key: key.replace("model.", "model.language_model.", 1)),
        ("llama4_text", lambda key: f"language_model.{key}"),
        ("mistral", lambda key: f"language_model.{key}"),
    ],
)
def test_the_language_model_of_one_that_also_sees(tmp_path, family, name):
    model = make_model(family)
    model.save_pretrained(tmp_path / "text")
    as_a_part(model, tmp_path / "whole", name)
    config = from_hf_directory(tmp_path / "whole")
    assert dataclasses.replace(config, eos_token_ids=(2,)) == from_hf_directory(tmp_path / "text")
    assert config.eos_token_ids == (1, 7)
    expected = read(tmp_path / "text")
    for key, weight in read(tmp_path / "whole").items():
        assert torch.equal(weight, expected[key])


def test_what_files_of_models_that_also_see_leave_out_has_the_defaults_of_transformers():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    theirs = transformers.Gemma3Config(text_config=dict(text)).text_config.to_dict()
    whole = {"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text"}, "eos_token_id": [1, 106]}
    ours = from_hf(whole)
    assert dataclasses.replace(ours, eos_token_ids=(1,), bos_token_id=2) == from_hf(theirs)
