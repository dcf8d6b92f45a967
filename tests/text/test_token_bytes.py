"""How tokens spell bytes, and reading that out of a tokenizer.json's decoder."""

from __future__ import annotations

import pytest
from reference_bpe import byte_alphabet

from transect.text.token_bytes import BYTE_LEVEL, byte_characters, spelling_of

LLAMA2 = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def test_byte_characters_are_gpt2s():
    assert byte_characters() == {char: byte for byte, char in enumerate(byte_alphabet())}


def test_byte_level():
    assert spelling_of({"type": "ByteLevel", "add_prefix_space": False}) == BYTE_LEVEL
    assert spelling_of({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}) == BYTE_LEVEL
    assert BYTE_LEVEL.bytes_of("Ġthe") == b" the"
    assert BYTE_LEVEL.bytes_of("æĹ¥") == "日".encode()
    assert BYTE_LEVEL.bytes_of("日") == "日".encode(), "not in the alphabet: plain text"
    assert BYTE_LEVEL.bytes_of("Ġé", literal=True) == "Ġé".encode(), "an added token is plain text"


def test_sentence_pieces():
    spelling = spelling_of(LLAMA2)
    assert spelling.leading_space
    assert spelling.bytes_of("▁the") == b" the"
    assert spelling.bytes_of("<0x0A>") == b"\n"
    assert spelling.bytes_of("<0xe6>") == b"\xe6"
    assert spelling.bytes_of("<0x0A>x") == b"<0x0A>x"


@pytest.mark.parametrize(("scheme", "space"), [("always", True), ("first", True), ("never", False)])
def test_metaspace(scheme, space):
    spelling = spelling_of({"type": "Metaspace", "replacement": "_", "prepend_scheme": scheme, "split": False})
    assert spelling.leading_space is space
    assert spelling.bytes_of("_a_b") == b" a b"
    assert spelling.bytes_of("<0x0A>") == b"<0x0A>", "without ByteFallback these are words"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##"},
        {"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "},
        {"type": "Strip", "content": "_", "start": 1, "stop": 0},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
    ],
)
def test_other_decoders_are_named(decoder):
    with pytest.raises(ValueError, match=f"decoder.*{decoder['type']}.*not supported"):
        spelling_of(decoder)


def test_without_a_decoder_the_pre_tokenizer_is_undone():
    assert spelling_of(None, {"type": "ByteLevel"}) == spelling_of({"type": "ByteLevel"})
    steps = {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "Metaspace", "replacement": "_"}]}
    assert spelling_of(None, steps).bytes_of("_a") == b" a"
    assert spelling_of(None).bytes_of("word") == b" word"
