"""Which tokenizer, chat template and ends of an answer a model gets."""

import json

import pytest
from tiny_llm import EOS, VOCAB, save_tiny_llm_text

from transect.checkpoints.resolve import ModelSource
from transect.spec.model import ModelConfig
from transect.text.model_text import load_text

CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture
def source(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    save_tiny_llm_text(model)
    sizes = {"vocab_size": VOCAB, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    config = ModelConfig(architecture="llama", ffn_dim=96, max_position=256, eos_token_ids=(EOS,), **sizes)
    return ModelSource("hf", model, config, "tiny")


def test_the_model_s_own(source):
    text = load_text(source)
    assert text.eos_token_ids == (EOS,) and text.chat_template is not None and not text.defaults.values


@pytest.mark.parametrize("as_file", [True, False])
def test_another_template(source, tmp_path, as_file):
    given = "{{ bos_token }}{{ messages[0].content }}"
    if as_file:
        (tmp_path / "t.jinja").write_text(given)
        given = str(tmp_path / "t.jinja")
    assert load_text(source, chat_template=given).chat_template.render(CHAT) == "<|im_start|>x"
    (source.path / "tokenizer_config.json").unlink()
    assert load_text(source, chat_template=given).chat_template.render(CHAT) == "x"


def test_another_tokenizer(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    save_tiny_llm_text(other, chat_template="other", eos_token="<258>")
    text = load_text(source, tokenizer=str(other))
    assert text.tokenizer.eos_token_ids == (258,) and text.eos_token_ids == (EOS, 258)
    assert text.chat_template.render(CHAT) == "other"


def test_ends_that_generation_config_adds(source, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert load_text(source, generation_config=str(tmp_path)).eos_token_ids == (EOS, 9, 3)
    with pytest.raises(ValueError, match=f"eos_token_id holds {VOCAB}, and the model has ids 0 to {VOCAB - 1}"):
        load_text(source, override_generation_config={"eos_token_id": VOCAB})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chat_template": "/no/such.jinja"}, "chat_template '/no/such.jinja' cannot be read"),
        ({"chat_template": "{{ oops"}, "the chat template is not valid Jinja"),
        ({"tokenizer": "/no/such/folder"}, "there is no tokenizer '/no/such/folder'"),
        ({"tokenizer_revision": "main"}, "tokenizer_revision needs tokenizer"),
        ({"tokenizer": ".", "tokenizer_revision": "main"}, "is for hub ids"),
    ],
)
def test_what_is_wrong_is_said(source, settings, words):
    with pytest.raises(ValueError, match=words):
        load_text(source, **settings)


def test_a_tokenizer_with_more_tokens_than_the_model_is_another_s(source, tmp_path, trained):
    trained.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has 1500 tokens and the model 300: it is another model's"):
        load_text(source, tokenizer=str(tmp_path))
