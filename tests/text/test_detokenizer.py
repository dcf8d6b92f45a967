"""Token by token is the same as all at once, for byte-level and for sentence-piece vocabularies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import samples
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as LibraryTokenizer

from transect.text.detokenizer import IncrementalDetokenizer
from transect.text.token_bytes import Spelling
from transect.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def sentence_pieces() -> Tokenizer:
    """Llama 2's kind: three special tokens, 256 byte tokens, a few words with the space mark."""
    words = ["▁", "▁Hello", "▁world", "wor", "ld", "▁▁", "日", "é", "!", "▁a▁b"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = LibraryTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, Spelling(False, (("▁", " "),), byte_tokens=True, leading_space=True))


@pytest.fixture(scope="module", params=["byte level", "sentence pieces"])
def tokenizer(request, toy):
    return toy if request.param == "byte level" else sentence_pieces()


@settings(max_examples=500)
@given(data=st.data(), skip=st.booleans(), continues=st.booleans())
def test_any_chunking_of_any_tokens_is_decode_of_all(tokenizer, data, skip, continues):
    """Single-byte tokens are common here, so most sequences break characters apart and many are not UTF-8 at all."""
    token = st.one_of(st.integers(0, tokenizer.vocab_size + 2), st.integers(3, 258))
    groups = data.draw(st.lists(st.lists(token, max_size=4), max_size=12))
    detokenizer = IncrementalDetokenizer(tokenizer, skip, continues_text=continues)
    pushed = [detokenizer.push(group) for group in groups]
    text = "".join(pushed) + detokenizer.flush()
    assert text == tokenizer.decode([token for group in groups for token in group], skip, continues_text=continues)


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=30))
def test_half_a_character_is_never_shown(toy, text):
    """Every push of valid text's tokens is valid text: a piece of the original without a replacement character."""
    detokenizer = IncrementalDetokenizer(toy)
    shown = ""
    for token in toy.encode(text):
        shown += detokenizer.push([token])
        assert text.startswith(shown)
    assert detokenizer.flush() == ""
    assert shown == text


def test_characters_come_out_as_soon_as_they_are_whole(toy):
    alphabet = [token for token in range(toy.vocab_size) if toy.token_bytes(token) in (b"\xe6", b"\x97", b"\xa5")]
    by_byte = {toy.token_bytes(token): token for token in alphabet}
    detokenizer = IncrementalDetokenizer(toy)
    assert [detokenizer.push([by_byte[byte]]) for byte in (b"\xe6", b"\x97", b"\xa5")] == ["", "", "日"]


def test_bytes_that_cannot_become_a_character_are_replaced_at_once():
    tokenizer = sentence_pieces()
    detokenizer = IncrementalDetokenizer(tokenizer, continues_text=True)
    lead, a = 3 + 0xE6, 3 + ord("a")
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push([a]) == REPLACEMENT + "a"
    assert detokenizer.push([lead]) == ""
    assert detokenizer.flush() == REPLACEMENT


def test_same_text_as_the_byte_level_decoder_of_the_library(toy, trained):
    """Bytes that are no UTF-8 included: one replacement character for each maximal invalid part."""
    ids = [token for text in samples(300, seed=5) for token in toy.encode(text)]
    for start in range(0, len(ids) - 7, 5):
        part = ids[start : start + 7 : 2]
        assert toy.decode(part, skip_special_tokens=False) == trained.decode(part, skip_special_tokens=False)


def test_leading_space_of_sentence_pieces():
    tokenizer = sentence_pieces()
    hello, world = tokenizer.token_id("▁Hello"), tokenizer.token_id("▁world")
    assert tokenizer.decode([1, hello, world]) == "Hello world"
    assert tokenizer.decode([hello, world], continues_text=True) == " Hello world"
    assert tokenizer.decode([1, hello], skip_special_tokens=False) == "<s> Hello"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in (1, hello, world)] == ["", "Hello", " world"]


def test_each_push_costs_what_its_own_tokens_cost(toy):
    """Counts look-ups: pushing the same token for the thousandth time looks at one token, as the first time did."""

    class Counting:
        special_ids = toy.special_ids
        drops_leading_space = False
        looked_up = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.looked_up += 1
            return toy.token_bytes(token_id)

    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting)
    for pushes in range(1, 1001):
        detokenizer.push([300])
        assert counting.looked_up == pushes
