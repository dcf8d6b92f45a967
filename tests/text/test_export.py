"""The tokenizer of a GGUF file, written as Hugging Face files, is the same tokenizer to every reader."""

import pytest

from transect.checkpoints.resolve import resolve
from transect.text.chat_template import ChatTemplate
from transect.text.export import export_tokenizer
from transect.text.hf_settings import read_hf_settings
from transect.text.tokenizer import Tokenizer

TEXTS = [
    "Hello, world",
    " leading",
    "a\n\nb\tc",
    "Ünïcödé 漢字 🙂",
    "1234567",
    "<|im_start|>user",
    "def f(x):\n    return x",
]


@pytest.fixture(scope="module")
def source():
    return resolve("smollm2-135m")


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("exported")
    export_tokenizer(source, directory)
    return directory


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("parse_special", [False, True])
def test_encodes_alike(source, exported, text: str, parse_special: bool) -> None:
    before, after = Tokenizer.from_source(source), Tokenizer.from_hf(exported)
    for special in (False, True):
        assert after.encode(text, special, parse_special) == before.encode(text, special, parse_special)
    assert after.eos_token_ids == before.eos_token_ids and after.bos_token_id == before.bos_token_id


def test_transformers_reads_it(source, exported) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(exported), Tokenizer.from_source(source)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text, add_special_tokens=True, parse_special=True)
    messages = [{"role": "user", "content": "Hi"}]
    template = ChatTemplate.from_source(source)
    assert template is not None
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == template.render(messages)
    assert read_hf_settings(exported).eos_token == theirs.eos_token


def test_a_directory_keeps_its_own_files(exported, tmp_path) -> None:
    from types import SimpleNamespace

    export_tokenizer(SimpleNamespace(kind="hf", path=exported, text_folder=exported), tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (exported / "tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer_config.json").exists()
