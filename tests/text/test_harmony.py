"""Answers in channels: parted alike in pieces of any size, and the grammar of them."""

import json
import random

import pytest
from byte_grammar import SPECIAL, accepts, constraint
from hypothesis import given
from hypothesis import strategies as st

from transect.text.harmony import HarmonyReader, grammar
from transect.text.tools.spec import tool_use

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
USE = tool_use([{"name": "add", "parameters": ADD}, {"name": "other.tool"}])
AGAIN = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I see <|thin>{AGAIN}"
PREAMBLE = f"<|channel|>commentary<|message|>Let me look.{AGAIN}"
FINAL = "<|channel|>final<|message|>2 + 2 = 4."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 4}'
ROLE_FIRST = ' to=functions.add<|channel|>commentary json<|message|>{"a": 4}'
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


def read(pieces, prompt=PROMPT, calls=True):
    reader = HarmonyReader(prompt, calls=calls)
    thoughts = text = ""
    found = []
    for index, piece in enumerate(pieces):
        more = reader.feed(piece, last=index == len(pieces) - 1)
        thoughts, text = thoughts + more[0], text + more[1]
        for call in more[2]:
            if call.name is not None:
                assert call.index == len(found) and call.id.startswith("call_")
                found.append([call.name, ""])
            found[call.index][1] += call.arguments
    assert reader.num_calls == len(found)
    return thoughts, text, [tuple(each) for each in found]


CASES = [
    (THOUGHT + FINAL + "<|return|>", "I see <|thin>", "2 + 2 = 4.", []),
    (THOUGHT + PREAMBLE + CALL + "<|call|>", "I see <|thin>", "Let me look.", [("add", '{"a": 4}')]),
    (THOUGHT + ROLE_FIRST, "I see <|thin>", "", [("add", '{"a": 4}')]),
    (THOUGHT + THOUGHT + FINAL, "I see <|thin>\n\nI see <|thin>", "2 + 2 = 4.", []),
    (CALL + AGAIN + CALL, "", "", [("add", '{"a": 4}'), ("add", '{"a": 4}')]),
    (FINAL + "<|start|>assistant" + THOUGHT.removesuffix(AGAIN), "I see <|thin>", "2 + 2 = 4.", []),
    ("No channels at all <|", "", "No channels at all <|", []),
    ("<|channel|>fin", "", "<|channel|>fin", []),
    ("assistant" * 40, "", "assistant" * 40, []),
]


@pytest.mark.parametrize(("whole", "thoughts", "text", "calls"), CASES)
@given(seed=st.integers(0, 2**32))
def test_pieces_of_any_size_make_the_same(whole, thoughts, text, calls, seed):
    rng, pieces, rest = random.Random(seed), [], whole
    while rest:
        size = rng.randint(1, 9)
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    assert read(pieces) == read(list(whole)) == read([whole]) == (thoughts, text, calls)


def test_calls_that_nobody_wants_are_text():
    assert read([THOUGHT + CALL], calls=False) == ("I see <|thin>", '{"a": 4}', [])


def test_an_answer_goes_on_within_a_message():
    assert read(["4."], PROMPT + "<|channel|>final<|message|>2 + 2 = ") == ("", "4.", [])
    assert read([f"hm{AGAIN}{FINAL}"], PROMPT + "<|channel|>analysis<|message|>I ") == ("hm", "2 + 2 = 4.", [])


@pytest.mark.parametrize("whole", [THOUGHT + FINAL, THOUGHT + PREAMBLE + THOUGHT + CALL, THOUGHT.removesuffix(AGAIN)])
def test_how_far_the_thoughts_go(whole):
    end = whole.rindex("I see <|thin>") + len("I see <|thin>") + len("<|end|>" if AGAIN in whole else "")
    for pieces in ([whole], list(whole)):
        reader = HarmonyReader(PROMPT, calls=True)
        for piece in pieces:
            reader.feed(piece)
        assert reader.thought_bytes == end


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_grammar_of_calls(mode):
    form = constraint(
        lark=grammar(tool_use([*({"name": t.name, "parameters": t.parameters} for t in USE.tools)], mode), SPECIAL)
    )
    for text in (
        CALL,
        THOUGHT + CALL,
        THOUGHT + PREAMBLE + THOUGHT + ROLE_FIRST,
        CALL.replace(" <|constrain|>json", ""),
    ):
        assert accepts(form, text), text
    for text in (CALL.replace("4", '"x"'), CALL.replace("add", "sub"), THOUGHT, "Hello", CALL + AGAIN + CALL):
        assert not accepts(form, text), text
    assert accepts(form, THOUGHT + FINAL) == (mode == "auto")


def test_the_grammar_of_a_form():
    schema = {"type": "object", "properties": {"b": {"type": "integer"}}, "additionalProperties": False}
    for use in (None, USE):
        form = constraint(lark=grammar(use, SPECIAL, form=True), json=schema)
        final = FINAL.replace("2 + 2 = 4.", json.dumps({"b": 2}))
        assert accepts(form, final) and accepts(form, THOUGHT + final)
        assert not accepts(form, THOUGHT + FINAL) and not accepts(form, json.dumps({"b": 2}))
        assert accepts(form, THOUGHT + CALL) == (use is not None)
