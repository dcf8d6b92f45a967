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


def test_what_the_template_says():
    told = {
        "{{ x }}<think></think>": "qwen3",
        "content.split('</think>')[-1]": "deepseek_r1",
        "[THINK]": "mistral",
        "between <think></think> and <response></response>": "granite_tags",
        "after 'Here is my thought process:'": "granite",
        "<|channel|>analysis<|message|>": "gpt_oss",
    }
    for template, name in told.items():
        found = thoughts_of("auto", template)
        assert found is not None and found.name == name
    assert thoughts_of("auto", "{{ messages }}") is None and thoughts_of("none", "<think></think>") is None


def test_an_answer_that_was_begun():
    assert QWEN.state("<a>user said <think>", "<think>hm") == "inside"
    assert QWEN.state("...", "<think>hm</think> So") == QWEN.state("...", "So") == "over"


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("<think>hm</think>\n\n<response>Yes <b></response>", "hm", "Yes <b>"),
        ("<think>hm</think><response>Yes</resp", "hm", "Yes</resp"),
        ("<think>hm</think>Yes", "hm", "Yes"),
        ("<think>hm</think><resp", "hm", "<resp"),
        ("No <response>", "", "No <response>"),
    ],
)
def test_an_answer_between_marks_of_its_own(text, thoughts, answer):
    for pieces in ([text], list(text)):
        parser = ThoughtParser(PARSERS["granite_tags"], "before")
        found = [parser.feed(piece, last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
        assert ("".join(each[0] for each in found), "".join(each[1] for each in found)) == (thoughts, answer)


def test_answer_marks_may_be_written_under_a_form():
    lead = PARSERS["granite_tags"].lead("before", SPECIAL)
    grammar = constraint(json={"type": "integer"}, lead=lead.rules)
    assert all(accepts(grammar, f"<think>hm</think>{mark}5") for mark in ("", "\n", "\n<response>", "<response>\n"))


@pytest.mark.parametrize(
    ("state", "text", "size"),
    [("before", "<think>é</think>\nYes", 17), ("before", "Yes", 0), ("inside", "é</th", 6), ("over", "Yes", 0)],
)
def test_how_far_the_thoughts_go(state, text, size):
    for pieces in ([text], list(text)):
        parser = ThoughtParser(QWEN, state)
        for piece in pieces:
            parser.feed(piece)
        assert parser.thought_bytes == size


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("state", ["inside", "before"])
def test_a_form_is_kept_to_after_the_thoughts(name, state):
    thoughts = PARSERS[name]
    lead = thoughts.lead(state, SPECIAL)
    grammar = constraint(json={"type": "integer"}, lead=lead.rules)
    begin = thoughts.begin if state == "before" else ""
    blank = "\n" if state == "before" and thoughts.end not in SPECIAL else ""
    for text in (f"{begin}5? {{}}{thoughts.end}\n\n5", f"{blank}{begin}{thoughts.end}-7"):
        assert accepts(grammar, text), text
    assert accepts(grammar, "5") == (state == "before")
    assert not accepts(grammar, f"{begin}x{thoughts.end}x") and not accepts(grammar, f"{begin}x")
    assert thoughts.lead("over", SPECIAL) is None
