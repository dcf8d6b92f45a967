"""Tokenizers and settings out of a Hugging Face directory, against transformers reading the same files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from text_samples import samples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from transect.text.chat_template import ChatTemplate
from transect.text.gguf_vocab_out import _vocabulary
from transect.text.tokenizer import Tokenizer as OurTokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]


def save(directory: Path, backend: Tokenizer, **config: object) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config})
    )
    return directory


@pytest.fixture(scope="module")
def byte_level(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like Llama 3: BOS by post-processor, and an added token that is text beyond the model's own vocabulary."""
    backend = Tokenizer.from_str(trained.to_str())
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    backend.add_special_tokens([AddedToken("<|late|>", normalized=False)])
    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    folder = tmp_path_factory.mktemp("byte_level")
    return save(folder, backend, bos_token="<|im_start|>", eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like Llama 2: spaces as ▁, one put before every text, and byte tokens for what has no token."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    bytes_ = [AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIALS, limit_alphabet=200, show_progress=False)
    backend.train_from_iterator([text for text in samples(600, seed=7) if text.isprintable()], trainer)
    model = json.loads(backend.to_str())["model"]
    words = [token for token in model["vocab"] if token not in SPECIALS]
    tokens = [*SPECIALS, *(token.content for token in bytes_), *words]
    backend.model = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        [tuple(merge) for merge in model["merges"]],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    fresh = Tokenizer(backend.model)
    fresh.normalizer, fresh.decoder = backend.normalizer, backend.decoder
    fresh.add_special_tokens(special)
    fresh.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(tmp_path_factory.mktemp("sentence_pieces"), fresh, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["byte_level", "sentence_pieces"])
def test_same_as_transformers(kind, request):
    from transformers import AutoTokenizer

    directory = request.getfixturevalue(kind)
    ours, theirs = OurTokenizer.from_hf(directory), AutoTokenizer.from_pretrained(directory)
    for text in samples(800, seed=4):
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special, parse_special=True)
            assert ids == theirs(text, add_special_tokens=special).input_ids, repr(text)
        for skip in (False, True):
            decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == decoded, repr(text)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_pieces"])
def test_round_trip_of_plain_text(kind, request):
    """Special strings too: without parse_special they are text. Sentence pieces take ▁ for a space, by their nature."""
    ours = OurTokenizer.from_hf(request.getfixturevalue(kind))
    for text in [*samples(800, seed=4), "<s></s><|im_end|><|late|><unk> <think>"]:
        ids = ours.encode(text)
        assert not ours.special_ids & set(ids), repr(text)
        assert ours.decode(ids) == (text.replace("▁", " ") if kind == "sentence_pieces" else text)


def test_added_tokens_keep_their_ids_in_plain_text(byte_level):
    ours = OurTokenizer.from_hf(byte_level)
    think, late = ours.token_id("<think>"), ours.token_id("<|late|>")
    assert ours.encode("<think>") == [think]
    assert ours.encode("<|late|>", parse_special=True) == [late]
    assert late not in ours.encode("<|late|>")
    assert {think, late} & ours.special_ids == {late}
    assert ours.vocab_size == late + 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path, trained):
    backend = Tokenizer.from_str(trained.to_str())
    backend.enable_truncation(5)
    backend.enable_padding(length=4)
    ours = OurTokenizer.from_hf(save(tmp_path, backend))
    assert ours.encode("") == []
    assert ours.decode(ours.encode("one two three four five six")) == "one two three four five six"


def model_directory(directory: Path, trained: Tokenizer, **files: object) -> Path:
    trained.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def test_where_the_ends_of_an_answer_are_written(tmp_path, trained):
    directory = model_directory(
        tmp_path,
        trained,
        tokenizer_config={"eos_token": "<|endoftext|>", "bos_token": None},
        config={"eos_token_id": 1, "bos_token_id": 1},
    )
    assert OurTokenizer.from_hf(directory).eos_token_ids == (0, 1)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    tokenizer = OurTokenizer.from_hf(directory)
    assert tokenizer.eos_token_ids == (0, 2), "generation_config.json speaks for config.json"
    assert tokenizer.bos_token_id == 1


def test_special_tokens_map_is_read_too(tmp_path, trained):
    directory = model_directory(tmp_path, trained, special_tokens_map={"eos_token": {"content": "<|im_end|>"}})
    assert OurTokenizer.from_hf(directory).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ({}, None, None),
        ({"chat_template": "one {{ bos_token }}"}, None, "one <s>"),
        ({"chat_template": "one"}, "two", "two"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
    ],
)
def test_chat_templates(tmp_path, config, file, expected):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    if file:
        (tmp_path / "chat_template.jinja").write_text(file)
    template = ChatTemplate.from_source(SimpleNamespace(kind="hf", path=tmp_path, text_folder=tmp_path))
    rendered = None if template is None else template.render([{"role": "user", "content": "x"}])
    assert rendered == expected


def test_from_source_takes_either_kind(tmp_path, trained, toy_metadata, toy):
    model_directory(tmp_path, trained)
    text = "hello world"
    from_hf = OurTokenizer.from_source(SimpleNamespace(kind="hf", path=tmp_path, text_folder=tmp_path))
    from_gguf = OurTokenizer.from_source(
        SimpleNamespace(kind="gguf", text_folder=None, gguf=SimpleNamespace(metadata=toy_metadata))
    )
    assert from_hf.encode(text) == from_gguf.encode(text) == toy.encode(text)


def test_damaged_directories_are_named(tmp_path, trained):
    with pytest.raises(ValueError, match=r"has no tokenizer.json: save it"):
        OurTokenizer.from_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer that can be read"):
        OurTokenizer.from_hf(tmp_path)
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        OurTokenizer.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json must hold a JSON object, found a list"):
        OurTokenizer.from_hf(tmp_path)


def test_a_decoder_of_another_kind_is_named(tmp_path):
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json: .*WordPiece.*not supported"):
        OurTokenizer.from_hf(tmp_path)


@pytest.mark.parametrize("cut", ["byte level", "metaspace", "words"])
def test_a_tokenizer_without_a_decoder_loads(tmp_path, trained, cut):
    text = "one two three"
    if cut == "byte level":
        backend = Tokenizer.from_str(trained.to_str())
        backend.decoder = None
        text = "one <two> thrée"
    else:
        mark = "▁" if cut == "metaspace" else ""
        words = {word: index for index, word in enumerate(["[UNK]", f"{mark}one", f"{mark}two", f"{mark}three"])}
        backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace() if mark else pre_tokenizers.Whitespace()
    ours = OurTokenizer.from_hf(save(tmp_path, backend))
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert b"".join(ours.token_bytes(token) for token in ids).removeprefix(b" ") == text.encode()
    if cut == "words":
        assert ours.decode(ids) == backend.decode(ids)


def test_sentence_pieces_go_into_gguf_files_and_come_back(sentence_pieces):
    """The metadata that a GGUF file gets describes the same tokenizer."""
    ours = OurTokenizer.from_hf(sentence_pieces)
    metadata = _vocabulary(sentence_pieces, ours, ours.vocab_size + 2)
    assert metadata["tokenizer.ggml.model"] == "llama" and metadata["tokenizer.ggml.add_space_prefix"]
    again = OurTokenizer.from_gguf(metadata)
    for text in samples(300, seed=5):
        ids = ours.encode(text, add_special_tokens=True)
        assert again.encode(text, add_special_tokens=True) == ids, repr(text)
        assert again.decode(ids) == ours.decode(ids)
    assert again.bos_token_id == ours.bos_token_id and again.eos_token_ids == ours.eos_token_ids
