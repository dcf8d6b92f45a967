"""Complaints about grammars are in this project's words, and name what users wrote."""

import pytest
from byte_grammar import constraint

from transect.text.grammar.complaints import explain

LIBRARY = ("Parser Error", "non-verbose", "regex parse", "convert", "llg", "GBNF", "^", "serde", "line 1 column")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(a"}, "a regular expression cannot be read: unclosed group"),
        ({"regex": "a{2,1}"}, "invalid repetition"),
        ({"regex": "(?=a)b"}, "look"),
        ({"grammar": "start: foo"}, "the rule foo, which it does not define"),
        ({"grammar": "root ::= foo"}, "the rule foo, which it does not define"),
        ({"grammar": "start: ("}, "line 1 cannot be read"),
        ({"json": {"type": "strin"}}, "the type strin"),
        ({"json": {"$ref": "#/x"}}, "refers to /x"),
        ({"json": {"type": "object", "required": 5}}, "required"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "no answer can satisfy it"),
    ],
)
def test_no_text_of_the_library_reaches_users(form, words):
    with pytest.raises(ValueError, match="here cannot be used: ") as caught:
        constraint(**form, field="here")
    assert words in str(caught.value)
    assert not [each for each in LIBRARY if each.lower() in str(caught.value).lower()]


def test_unknown_complaints_are_not_shown():
    assert "0xdead" not in explain("Panic: internal state 0xdead")
    assert explain("Current row has 3001 items; max is 2000; consider making your grammar left-recursive") == (
        "it is too large or too complex: make it simpler"
    )
