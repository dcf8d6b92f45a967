"""SentencePiece vocabularies in GGUF metadata, against the sentencepiece library on vocabularies trained here."""

from __future__ import annotations

import io

import numpy as np
import pytest
from text_samples import samples

from transect.text.gguf_pieces import merges_of
from transect.text.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

USER = "<start_of_turn>"
SETTINGS = {
    "vocab_size": 1600, "byte_fallback": True, "user_defined_symbols": [USER], "character_coverage": 0.98,
    "remove_extra_whitespaces": False, "normalization_rule_name": "identity", "minloglevel": 2,
}  # fmt: skip


def trained(kind, **changes):
    """A processor, and its vocabulary as the metadata of a GGUF file."""
    lines = [text for text in samples(500, seed=7) if text.isprintable() and text.strip() and USER not in text]
    out = io.BytesIO()
    settings = SETTINGS | {"model_type": kind, "hard_vocab_limit": kind == "bpe"} | changes
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **settings)
    made = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    count = made.get_piece_size()
    kinds = [
        2 if made.is_unknown(i) else 3 if made.is_control(i) else 6 if made.is_byte(i) else 1 for i in range(count)
    ]
    kinds[made.piece_to_id(USER)] = 4
    prefix = "tokenizer.ggml."
    return made, {
        f"{prefix}model": "llama" if kind == "bpe" else "t5",
        f"{prefix}tokens": [made.id_to_piece(i) for i in range(count)],
        f"{prefix}scores": [made.get_score(i) for i in range(count)],
        f"{prefix}token_type": kinds,
        f"{prefix}bos_token_id": made.bos_id(),
        f"{prefix}eos_token_id": made.eos_id(),
        f"{prefix}unknown_token_id": made.unk_id(),
        f"{prefix}add_space_prefix": settings.get("add_dummy_prefix", True),
        f"{prefix}remove_extra_whitespaces": settings["remove_extra_whitespaces"],
        f"{prefix}precompiled_charsmap": [],
    }


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def llama(kind):
    """With a space before every text, as Llama 2 has it."""
    return trained(kind)


@pytest.fixture(scope="module")
def gemma(kind):
    """Without."""
    return trained(kind, add_dummy_prefix=False)


TEXTS = [text for text in samples(400, seed=4) if "\u2581" not in text and USER not in text and "\0" not in text]


@pytest.mark.parametrize("which", ["llama", "gemma"])
def test_same_ids_and_text_as_sentencepiece(kind, which, request):
    theirs, metadata = request.getfixturevalue(which)
    ours = Tokenizer.from_gguf(metadata)
    special = ("<unk>", "<s>", "</s>")
    compared = 0
    for text in TEXTS:
        if any(each in text for each in special):
            continue
        ids = ours.encode(text)
        assert ids == theirs.encode(text), repr(text)
        assert ours.decode(ids) == text
        compared += 1
    assert compared > 300
    assert ours.bos_token_id == theirs.bos_id() and ours.eos_token_ids == (theirs.eos_id(),)


def test_what_goes_around_a_text_and_special_tokens(llama, kind):
    theirs, metadata = llama
    ours = Tokenizer.from_gguf(metadata)
    plain = theirs.encode("a b")
    around = [theirs.bos_id(), *plain] if kind == "bpe" else [*plain, theirs.eos_id()]
    assert ours.encode("a b", add_special_tokens=True) == around
    user = theirs.piece_to_id(USER)
    assert ours.encode(f"{USER}a b") == [user, *plain]
    assert ours.encode("</s>a", parse_special=True)[0] == theirs.eos_id()
    assert theirs.eos_id() not in ours.encode("</s>a")
    for spelled in ("</s>a", "<unk>", "b<s>", "<0x41>"):  # text is never a token of the protocol, nor a byte
        assert not set(ours.encode(spelled)) & {0, 1, 2, theirs.piece_to_id("<0x41>")}
        assert ours.decode(ours.encode(spelled)) == spelled
    assert ours.decode([theirs.bos_id(), *plain]) == "a b"


def test_a_metadata_flag_turns_bos_off(llama):
    _, metadata = llama
    changed = metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}
    ours = Tokenizer.from_gguf(changed)
    assert ours.encode("a", add_special_tokens=True) == ours.encode("a")


def test_bytes_without_a_token_of_their_own(llama):
    theirs, metadata = llama
    ours = Tokenizer.from_gguf(metadata)
    ids = ours.encode("\U0001f680")
    assert ids[-4:] == [theirs.piece_to_id(f"<0x{byte:02X}>") for byte in "\U0001f680".encode()]
    assert ours.token_bytes(ids[-1]) == b"\x80" and ours.decode(ids) == "\U0001f680"


def test_rules_of_normalisation(kind):
    """NFKC as SentencePiece compiles it: the file carries the rules as bytes, signed or not."""
    model = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    theirs, metadata = trained(kind, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    model.ParseFromString(theirs.serialized_model_proto())
    rules = np.frombuffer(model.normalizer_spec.precompiled_charsmap, np.int8)
    assert len(rules) > 1000
    ours = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.precompiled_charsmap": rules})
    for text in ("\ufb01ne  \u2163", "  a   b ", "\uff21\uff22c"):
        assert ours.encode(text) == theirs.encode(text), repr(text)


def test_text_is_no_token_of_the_protocol_though_its_halves_are_tokens():
    tokens, kinds = ["<unk>", "<s>", "</s>", "\u2581", "<", "/", "s", ">", "</", "s>"], [2, 3, 3] + [1] * 7
    values = {"model": "llama", "tokens": tokens, "scores": [0.0, 0, 0, -3, -4, -5, -6, -7, -1, -2]}
    values |= {"token_type": kinds, "eos_token_id": 2, "add_bos_token": False}
    ours = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    assert ours.encode("</s>") == [3, 8, 9] and ours.encode("</s>", parse_special=True)[-1] == 2


def test_merges_are_ranked_by_score():
    tokens, scores = ["a", "b", "c", "ab", "abc", "bc"], [0, 0, 0, -2, -3, -1]
    assert merges_of(tokens, scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "tokens but 1 scores"),
        ({"scores": None}, "tokens but 0 scores"),
        ({"scores": [float("nan")]}, "scores of the GGUF file must be finite numbers"),
        ({"scores": ["x"]}, "scores of the GGUF file must be finite numbers"),
        ({"token_type": [1]}, "but 1 token types"),
        ({"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap of the GGUF file cannot be read"),
        ({"unknown_token_id": 10**6}, "unknown_token_id is 1000000"),
        ({"tokens": ["a", "b", "a"], "scores": [0, 0, 0], "token_type": [1, 1, 1]}, "lists 1 of its 3 tokens twice"),
    ],
)
def test_damaged_metadata_is_named(llama, changes, message):
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in {**llama[1], **changed}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata)
