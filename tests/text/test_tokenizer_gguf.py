"""Tokenizers out of GGUF metadata, against a plain-Python BPE and against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from reference_bpe import ReferenceBPE
from text_samples import samples
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from transect.checkpoints.pull import pull
from transect.text.tokenizer import Tokenizer

SMOLLM_PATTERNS = [
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+",
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def reference(smollm2_metadata):
    tokens, kinds = smollm2_metadata["tokenizer.ggml.tokens"], smollm2_metadata["tokenizer.ggml.token_type"]
    specials = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 3}
    return ReferenceBPE(tokens, smollm2_metadata["tokenizer.ggml.merges"], SMOLLM_PATTERNS, specials)


def test_same_ids_as_the_reference_and_round_trip_in_every_script(smollm2, reference):
    for text in samples(4000):
        ids = smollm2.encode(text)
        assert ids == reference.encode(text), repr(text)
        assert smollm2.decode(ids) == smollm2.decode(ids, skip_special_tokens=False) == reference.representable(text)


def test_nearly_every_sample_survives_whole(reference):
    """SmolLM2 cannot spell six control characters and unused planes, but the rest: the round trip means something."""
    changed = [text for text in samples(4000) if reference.representable(text) != text]
    assert all(set(text) & set("\x04\x06\x13\x14\x16\x1d\U0010ffff") for text in changed)
    assert len(changed) < 200


def test_same_ids_as_the_reference_with_special_tokens_parsed(smollm2, reference):
    for text in samples(300, seed=3):
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = smollm2.encode(text, parse_special=True)
        assert ids == reference.encode(text, parse_special=True), repr(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == reference.representable(text)


@examples(100, 300)
@given(text=TEXT)
def test_random_unicode(smollm2, reference, text):
    ids = smollm2.encode(text)
    assert ids == reference.encode(text)
    assert smollm2.decode(ids) == reference.representable(text)


def test_same_ids_as_the_published_pipeline_in_transformers(smollm2, smollm2_metadata):
    """SmolLM2's published tokenizer.json: single digits, then GPT-2's byte level; run by transformers."""
    from transformers import PreTrainedTokenizerFast

    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_metadata["tokenizer.ggml.merges"]]
    backend = LibraryTokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend)
    texts = samples(1500, seed=1)
    for text, expected in zip(texts, theirs(texts, add_special_tokens=False).input_ids, strict=True):
        assert smollm2.encode(text, parse_special=True) == expected, repr(text)
        for skip in (False, True):
            decoded = theirs.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert smollm2.decode(expected, skip_special_tokens=skip) == decoded


@pytest.mark.prove  # transformers reads the file for half a minute
def test_same_ids_as_transformers_reading_the_gguf_file(smollm2, reference, tmp_path: Path):
    """Transformers does not know the file's pre-tokenizer and cuts as GPT-2 does, which is the same without digits; and
    it has an "unknown" token (of all things, the one that ends a text) for bytes that have none."""
    from transformers import AutoTokenizer

    (tmp_path / "model.gguf").symlink_to(pull("smollm2-135m"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf", local_files_only=True)
    texts = [text for text in samples(1500, seed=2) if not any(char.isnumeric() for char in text)]
    texts = [text for text in texts if reference.representable(text) == text]
    assert len(texts) > 300
    for text in texts:
        assert smollm2.encode(text, parse_special=True) == theirs(text, add_special_tokens=False).input_ids, repr(text)


def test_what_smollm2_says_about_itself(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_id("<|im_end|>") == 2
    assert smollm2.encode("hi", add_special_tokens=True) == smollm2.encode("hi")
    assert not smollm2.drops_leading_space


def test_special_strings_in_raw_text_are_text(toy):
    ids = toy.encode("a<|im_end|>b")
    assert not toy.special_ids & set(ids)
    assert toy.decode(ids) == "a<|im_end|>b"
    parsed = toy.encode("a<|im_end|>b", parse_special=True)
    assert parsed.count(2) == 1
    assert toy.decode(parsed) == "ab"
    assert toy.decode(parsed, skip_special_tokens=False) == "a<|im_end|>b"


def test_added_tokens_that_are_text_are_always_recognised(toy):
    think = toy.token_id("<think>")
    assert toy.encode("<think>") == toy.encode("<think>", parse_special=True) == [think]
    assert think not in toy.special_ids
    assert toy.decode([think]) == "<think>"


@pytest.mark.parametrize(("flag", "front", "back"), [("add_bos_token", [1], []), ("add_eos_token", [], [2])])
def test_bos_and_eos_where_the_file_asks_for_them(toy_metadata, flag, front, back):
    tokenizer = Tokenizer.from_gguf({**toy_metadata, f"tokenizer.ggml.{flag}": True})
    plain = tokenizer.encode("hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == front + plain + back
    assert tokenizer.encode("", add_special_tokens=True) == front + back


def test_all_ends_of_an_answer_count(toy_metadata):
    tokenizer = Tokenizer.from_gguf({**toy_metadata, "tokenizer.ggml.eot_token_id": 0})
    assert tokenizer.eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("spelled", "count"),
    [
        (["<end_of_turn>"], 1),
        (["<|end|>"], 1),
        (["<|end|>", "<|call|>", "<|return|>"], 2),
        (["<|end|", "end_of_turn"], 0),
    ],
)
def test_turns_end_where_their_tokens_are_spelled_so(toy_metadata, spelled, count):
    """Files of Gemma, Phi and gpt-oss have them and name one end of several. gpt-oss goes on after <|end|>."""
    tokens, kinds = (toy_metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    more = {"tokens": [*tokens, *spelled], "token_type": [*kinds, *[3] * len(spelled)]}
    tokenizer = Tokenizer.from_gguf(toy_metadata | {f"tokenizer.ggml.{key}": more[key] for key in more})
    ends = set(range(len(tokens) + len(spelled) - count, len(tokens) + len(spelled)))
    assert set(tokenizer.eos_token_ids) == {2} | ends and tokenizer.eos_token_ids[0] == 2


def test_arrays_from_other_readers_do(toy_metadata, toy):
    kinds = np.array(toy_metadata["tokenizer.ggml.token_type"], dtype=np.int32)
    tokenizer = Tokenizer.from_gguf({**toy_metadata, "tokenizer.ggml.token_type": kinds})
    assert tokenizer.special_ids == toy.special_ids


def test_qwen2_normalises_to_form_c(toy_metadata):
    tokenizer = Tokenizer.from_gguf({**toy_metadata, "tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_ids_without_a_token_are_no_text_and_negative_ones_are_refused(toy):
    assert toy.decode([toy.vocab_size, 10**9]) == ""
    with pytest.raises(ValueError, match="at least 0, got -1"):
        toy.decode([-1])


def test_a_lone_surrogate_is_refused(toy):
    with pytest.raises(ValueError, match=r"lone surrogate .* at character 2"):
        toy.encode("ab\ud800")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "holds a 'bert' one.*tokenizer.json"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "gpt2"}, r"'gpt2' \(did you mean 'gpt-2'\?\).*llama-bpe.*qwen2.*smollm"),
        ({"tokens": None}, "no list of strings under tokenizer.ggml.tokens"),
        ({"merges": [1, 2]}, "no list of strings under tokenizer.ggml.merges"),
        ({"merges": ["zz yy"]}, "merges of the GGUF file do not fit its tokens"),
        ({"token_type": [1, 1]}, "but 2 token types"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"tokens": ["a", "b", "a"]}, "lists 1 of its 3 tokens twice"),
    ],
)
def test_damaged_metadata_is_named(toy_metadata, changes, message):
    metadata = {**toy_metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


def test_a_file_without_a_pre_tokenizer_name_says_so(toy_metadata):
    metadata = {key: value for key, value in toy_metadata.items() if key != "tokenizer.ggml.pre"}
    with pytest.warns(UserWarning, match="'default' is used"):
        tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("a b 1234!")) == "a b 1234!"
