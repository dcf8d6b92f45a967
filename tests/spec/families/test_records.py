"""Each family's record, on its tiny model: read as transformers reads it, written both ways, saved and read back."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny_checkpoints import tiny_values

from transect.checkpoints.hf import places as hf_places
from transect.checkpoints.hf import stored_hf
from transect.checkpoints.hf_out import save_hf
from transect.models.context import VarlenContext
from transect.models.decoder import Decoder
from transect.models.stored import read_all
from transect.spec.families import registry
from transect.spec.families.registry import families
from transect.spec.gguf import from_gguf, to_gguf
from transect.spec.gguf_places import places as gguf_places
from transect.spec.hf import from_hf, from_hf_directory, to_hf
from transect.spec.weights import weight_shapes


@pytest.mark.parametrize("name", families())
def test_config_json_is_what_transformers_reads(name):
    values = tiny_values(name)
    config = from_hf(values)
    written = json.loads(json.dumps(to_hf(config)))
    assert from_hf(written) == config
    theirs = transformers.CONFIG_MAPPING[name]
    assert from_hf(theirs.from_dict(values).to_dict()) == config
    assert from_hf(theirs.from_dict(written).to_dict()) == config
    assert written["architectures"] == [families()[name].hf_class]
    assert hasattr(transformers, families()[name].hf_class)


@pytest.mark.parametrize("name", families())
def test_written_weights_are_read_back_here_and_by_transformers(name, tmp_path):
    config = from_hf(tiny_values(name))
    model = Decoder(config, dtype=torch.float32).init_weights(0.3, torch.Generator().manual_seed(0))
    state = model.state_dict()
    save_hf(state, config, tmp_path)
    assert from_hf_directory(tmp_path) == config
    back = dict(read_all(stored_hf(tmp_path, config)))
    assert set(back) == set(weight_shapes(config)) and all(torch.equal(back[name], state[name]) for name in back)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.arange(3, 30)
    with torch.no_grad():
        ours = model.logits(model(tokens, torch.arange(27), VarlenContext(torch.tensor([0, 27]).int(), model.ops)))
        assert (ours - theirs.eval()(tokens[None]).logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("name", families())
def test_each_weight_has_a_place_of_its_own(name):
    config = from_hf(tiny_values(name))
    for places in (hf_places, gguf_places):
        found = [(place.tensor, place.first) for place in places(config).values()]
        assert len(set(found)) == len(found) == len(weight_shapes(config))


def test_published_shapes_survive_both_files():
    for record in families().values():
        for _, config in record.presets.values():
            assert from_hf(to_hf(config)) == config
            if config.rope.scaling == "none":  # another is a tensor in GGUF files
                tensors = {place.tensor: SimpleNamespace(shape=place.stored) for place in gguf_places(config).values()}
                ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
                tokens = {f"tokenizer.ggml.{key}": token for key, token in ends.items()}
                assert from_gguf(to_gguf(config) | tokens, tensors) == config


def test_two_records_of_one_name_are_refused(monkeypatch):
    from transect.spec.families import qwen2

    monkeypatch.setattr(qwen2, "SECOND", type(qwen2.QWEN2)(name="llama", models="", hf_class="", hf=()), raising=False)
    with pytest.raises(ValueError, match="two families are called 'llama': rename one"):
        registry.families.__wrapped__()
