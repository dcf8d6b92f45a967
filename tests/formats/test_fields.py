"""Values out of files: every wrong one is an error that names its field, in every file that a model brings."""

import json
import math

import pytest
from tiny_llm import save_tiny_llm

from transect.spec.fields import Fields, read_json_object
from transect.spec.gguf import from_gguf
from transect.spec.hf import from_hf, from_hf_directory
from transect.text.chat_template import ChatTemplate
from transect.text.gguf_vocab import gguf_chat_template, read_gguf_vocabulary
from transect.text.hf_settings import read_hf_settings
from transect.text.tokenizer import Tokenizer

DEEP = '{"a":' * 990 + "1" + "}" * 990
WRONG = [
    *(math.nan, math.inf, -math.inf, 1e308, -1e308, 10**30, -(10**30), 10**5000, -1, 0, 2.5, "x", "", True, False),
    *([], {}, [1], [[]], [None], {"a": 1}, ["x", 1], [math.nan], [10**30]),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory)
    return directory


def only_value_errors(work, words=()):
    """Run it: it works, or raises a ValueError of one reasonable line with one of these words."""
    try:
        work()
    except ValueError as error:
        assert 10 < len(str(error)) < 1000, str(error)[:1000]
        assert not words or any(word in str(error) for word in words), error
        return True
    return False


HF = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 16,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_theta": 1e4,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.1,
    "truncate": True,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "type": "yarn",
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("key", [*HF, "rope_scaling", "rope_parameters"])
def test_config_json(key):
    refused = [value for value in WRONG if only_value_errors(lambda v=value: from_hf({**HF, key: v}))]
    assert len(refused) > len(WRONG) // 2 or key in ("use_sliding_window", "max_window_layers")


@pytest.mark.parametrize("scaling", [YARN, LLAMA3])
def test_rope_parameters(scaling):
    for key in scaling:
        for value in WRONG:
            only_value_errors(lambda k=key, v=value: from_hf({**HF, "rope_scaling": {**scaling, k: v}}))
    with pytest.raises(ValueError, match=r"'factor' in the rope parameters of config.json must be a finite number"):
        from_hf({**HF, "rope_scaling": {**YARN, "factor": math.nan}})


@pytest.mark.parametrize(
    "text", [DEEP, '{"hidden_size": NaN}', '{"hidden_size": ' + "9" * 5000 + "}", "[]", '"\\ud800']
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_files_that_are_no_json_name_the_file(tiny, tmp_path, name, text):
    for file in tiny.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / name).write_text(text)

    def load():
        from_hf_directory(tmp_path)
        read_hf_settings(tmp_path)
        Tokenizer.from_hf(tmp_path)

    assert only_value_errors(load, [name, "config.json"]) or text is DEEP


@pytest.mark.parametrize("key", ["bos_token", "eos_token", "chat_template", "eos_token_id", "bos_token_id"])
def test_settings_of_a_tokenizer(tiny, tmp_path, key):
    (tmp_path / "tokenizer.json").write_text((tiny / "tokenizer.json").read_text())
    file = tmp_path / ("generation_config.json" if key.endswith("_id") else "tokenizer_config.json")
    for value in [*WRONG, [{"name": "default"}], [{"template": "x"}], {"content": 5}, {"content": None}]:
        if isinstance(value, int) and abs(value) > 10**1000:
            continue  # json does not write it
        file.write_text(json.dumps({key: value}))
        only_value_errors(
            lambda: (Tokenizer.from_hf(tmp_path), read_hf_settings(tmp_path)), [key, file.name, "template"]
        )


class Tensor:
    shape = (300, 64)


GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.attention.value_length": 16,
    "llama.rope.dimension_count": 16,
    "llama.context_length": 256,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.sliding_window": 8,
    "llama.expert_count": 0,
    "llama.rope.freq_base": 1e4,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
    "llama.rope.scaling.yarn_beta_fast": 32.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 2,
}


@pytest.mark.parametrize("key", GGUF)
def test_gguf_metadata(key):
    tensors = {"token_embd.weight": Tensor()}
    assert not only_value_errors(lambda: from_gguf(GGUF, tensors))
    refused = [v for v in WRONG if only_value_errors(lambda v=v: from_gguf({**GGUF, key: v}, tensors))]
    assert len(refused) > len(WRONG) // 2


VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.chat_template": "x",
}


@pytest.mark.parametrize("key", VOCABULARY)
def test_a_vocabulary_in_gguf_metadata(key):
    def load(metadata):
        read_gguf_vocabulary(metadata)
        template, bos, eos = gguf_chat_template(metadata)
        if template is not None:
            ChatTemplate(template, bos, eos)

    assert not only_value_errors(lambda: load(VOCABULARY))
    refused = [value for value in WRONG if only_value_errors(lambda v=value: load({**VOCABULARY, key: v}))]
    assert len(refused) > len(WRONG) // 2


def test_the_reader_says_what_it_wants(tmp_path):
    read = Fields({"a": [1], "b": 10**5000, "c": math.inf, "d": "x" * 1000, "n": None}, "f.json", "")
    for work, words in (
        (lambda: read.integer("a"), r"'a' in f.json must be a whole number, not \[1\]"),
        (lambda: read.integer("b"), "from 0 to 2147483647, not a number of more than 76 digits"),
        (lambda: read.number("c"), "'c' in f.json must be a finite number of at most 1e[+]30, not inf"),
        (lambda: read.flag("d", True), "'d' in f.json must be true or false, not 'xxx.{20,60}$"),
        (lambda: read.text("n"), "f.json has no 'n': it must be a string"),
        (lambda: read.token_ids("c"), "'c' in f.json must be a token id or a list of them, not inf"),
    ):
        with pytest.raises(ValueError, match=words):
            work()
    assert (read.integer("n", 3), read.token_id("n"), read.token_ids("n")) == (3, None, ())
    with pytest.raises(FileNotFoundError):
        read_json_object(tmp_path / "missing")
