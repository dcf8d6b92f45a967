"""Guesses of the drafters, and the index they look in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transect.engine.scheduling.drafters.drafter import Guess, under_grammar
from transect.engine.scheduling.drafters.ngram import NgramDrafter
from transect.engine.scheduling.drafters.registry import METHODS, SpeculativeConfig
from transect.engine.scheduling.drafters.suffix import SuffixDrafter
from transect.engine.scheduling.drafters.token_index import TokenIndex


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(3, 6))
def test_matches_are_those_of_a_plain_search(tokens: list[int], order: int, longest: int):
    index = TokenIndex(order)
    index.extend(tokens)
    found = index.matches(tokens, longest)
    for length, place in found:
        assert place < len(tokens) and order <= length <= max(longest, order)
        assert tokens[place - length : place] == tokens[len(tokens) - length :]
    places = [p for p in range(order, len(tokens)) if tokens[p - order : p] == tokens[len(tokens) - order :]]
    assert [place for _, place in found] == places[::-1][: len(found)]
    assert len(found) == len(places) or len(found) >= 16


def test_a_copy_goes_round_behind_the_end():
    index = TokenIndex(1)
    index.extend([1, 2, 3])
    assert index.copy_from(1, 5) == (2, 3, 2, 3, 2)
    assert index.copy_from(3, 5) == ()


def test_ngram_prefers_the_longest_match_and_then_the_newest():
    drafter = NgramDrafter(shortest=1, longest=4)
    guess = drafter.guess(0, (5, 6, 7, 9, 6, 8, 5), [6], 2)
    assert guess == Guess((7, 9), (1.0, 1.0), 2)
    assert drafter.guess(0, (5, 6, 7, 9, 6, 8, 5), [6, 4], 2) == Guess()
    assert NgramDrafter(1, 1).guess(0, (6, 7, 6, 8), [6], 1).tokens == (8,)


def test_ngram_says_how_many_equally_long_matches_agree():
    prompt = (1, 2, 5, 6, 1, 2, 7, 6, 1, 2, 5, 8)
    guess = NgramDrafter(shortest=2, longest=4).guess(0, prompt, [1, 2], 3)
    assert guess == Guess((5, 8, 1), (2 / 3, 1 / 2, 1.0), 2)


def test_suffix_votes_and_knows_earlier_answers():
    drafter = SuffixDrafter(shortest=2, longest=8)
    assert drafter.guess(1, (1, 2), [], 3) == Guess()
    for last in (7, 7, 8):
        drafter.ended(0, [1, 2, last, 4, 4])
    guess = drafter.guess(1, (1, 2), [], 3)
    assert guess.tokens == (7, 4, 4)
    assert guess.shares == pytest.approx((2 / 3, 1.0, 1.0))
    assert drafter.guess(2, (4, 4), [], 3).tokens == ()  # an answer ends there, and the next is another's


def test_suffix_forgets_the_older_half():
    drafter = SuffixDrafter(shortest=1, longest=4, kept=10)
    for first in range(10, 40, 3):
        drafter.ended(0, [first, first + 1, first + 2])
    assert drafter.guess(1, (10,), [], 1) == Guess()
    assert drafter.guess(2, (37,), [], 1).tokens == (38,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "medusa"}, "must be one of ngram, suffix"),
        ({}, "needs a method"),
        ({"method": "ngram", "tokens": 3}, "no setting tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "must not exceed"),
        ({"method": "ngram", "adaptive": 1}, "true or false"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(settings)


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_ended_is_forgotten(method: str):
    drafter = SpeculativeConfig(method=method, prompt_lookup_min=1).drafter()
    assert drafter.guess(3, (1, 2, 1), [], 1).tokens == (2,)
    drafter.ended(3, [])
    assert drafter.guess(3, (4, 5), [], 1) == Guess()


class _Spells:
    """A grammar that allows one text, whose upper-case letters are a choice and its lower-case ones forced."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text, self.at = text, at

    def fork(self):
        return _Spells(self.text, self.at)

    @property
    def terminated(self) -> bool:
        return self.at == len(self.text)

    def accept(self, token: int) -> str | None:
        if self.terminated or chr(token) != self.text[self.at]:
            return "no"
        self.at += 1
        return None

    def forced(self) -> list[int]:
        rest = self.text[self.at :]
        return [ord(letter) for letter in rest[: next((i for i, each in enumerate(rest) if each.isupper()), len(rest))]]


@pytest.mark.parametrize(
    ("guess", "fitted"),
    [
        ("AbcD", "AbcD"),
        ("Axxx", "Abc"),  # forced tokens in the place of wrong ones; what follows them was a guess after the wrong
        ("Ab", "Ab"),
        ("X", ""),
        ("AbcDef!!", "AbcDef"),  # the answer has ended
        ("AbcDxx", "AbcDef"),
    ],
)
def test_drafts_fit_their_grammar(guess, fitted):
    grammar = _Spells("AbcDef")
    assert bytes(under_grammar(grammar, [ord(each) for each in guess], ())).decode() == fitted and grammar.at == 0
    assert bytes(under_grammar(grammar, b"AbcDef", (ord("c"),))).decode() == "Abc"  # nothing after a stop token
