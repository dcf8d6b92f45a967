"""Thoughts: where a prompt leaves the model, and how an answer is parted in pieces of any size."""

import pytest
from byte_grammar import SPECIAL, accepts, constraint
from hypothesis import given
from hypothesis import strategies as st

from transect.text.reasoning import PARSERS, ThoughtParser, thoughts_of

QWEN = PARSERS["qwen3"]


def test_where_the_prompt_leaves_the_model():
    assert QWEN.state("<|im_start|>assistant\n") == "before"
    assert QWEN.state("<|im_start|>assistant\n<think>\n") == "inside"
    assert QWEN.state("assistant\n<think>\n\n</think>\n\n") == "over"
    assert thoughts_of(None) is None
    with pytest.raises(ValueError, match=r"'x'; there are deepseek_r1"):
        thoughts_of("x")


@pytest.mark.parametrize(
    ("state", "text", "thoughts", "answer"),
    [
        ("before", "<think>a < b</th ink</think>\n\nYes </think>", "a < b</th ink", "Yes </think>"),
        ("before", "\n<think>a", "a", ""),
        ("before", "<thin", "", "<thin"),
        ("before", "Yes <think>x</think>", "", "Yes <think>x</think>"),
        ("inside", "a</think>b", "a", "b"),
        ("inside", "a</thi", "a</thi", ""),
        ("over", "<think>b", "", "<think>b"),
    ],
)
@given(sizes=st.lists(st.integers(1, 9), min_size=60, max_size=60))
def test_pieces_of_any_size_make_the_same(state, text, thoughts, answer, sizes):
    parser = ThoughtParser(QWEN, state)
    found, at = ["", ""], 0
    for size in sizes:
        piece = text[at : at + size]
        at += size
        more = parser.feed(piece, last=at >= len(text))
        found = [found[0] + more[0], found[1] + more[1]]
        if at >= len(text):
            break
    assert found == [thoughts, answer]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("state", ["inside", "before"])
def test_a_form_is_kept_to_after_the_thoughts(name, state):
    thoughts = PARSERS[name]
    lead = thoughts.lead(state, SPECIAL)
    grammar = constraint(json={"type": "integer"}, lead=lead.rules)
    begin = thoughts.begin if state == "before" else ""
    for text in (f"{begin}5? {{}}{thoughts.end}\n\n5", f"{begin}{thoughts.end}-7"):
        assert accepts(grammar, text), text
    assert accepts(grammar, "5") == (state == "before")
    assert not accepts(grammar, f"{begin}x{thoughts.end}x") and not accepts(grammar, f"{begin}x")
    assert thoughts.lead("over", SPECIAL) is None
