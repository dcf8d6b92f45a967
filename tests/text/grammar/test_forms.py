"""The other forms of answers, and what is wrong with those that cannot be read."""

import pytest
from byte_grammar import END, accepts, allowed, constraint

from transect.text.grammar.params import MAX_CHOICES, MAX_REGEX_BYTES, StructuredOutputsParams
from transect.text.grammar.sources import tidy


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"regex": "[ab]+/\\d"}, ["a/1", "abba/9"], ["a", "a/x", ""]),
        ({"regex": "^x\\$$"}, ["x$"], ["^x$", "x"]),
        ({"regex": "a\nb|\\\\/"}, ["a\nb", "\\/"], ["ab"]),
        ({"choice": ["yes", 'a "quoted" one', "naïve\n"]}, ["yes", 'a "quoted" one', "naïve\n"], ["ye", "yes "]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{"]),
        ({"grammar": 'root ::= "a" rest\nrest ::= [0-9]+ | "-"'}, ["a12", "a-"], ["a", "b"]),
        ({"grammar": 'start: "[" (NUMBER ("," NUMBER)*)? "]"\nNUMBER: /[0-9]+/'}, ["[]", "[1,22]"], ["[1,]", "1"]),
        ({"json": True}, ["1", "{}", '"x"'], ["x"]),
        ({"json": '{"type": "integer"}'}, ["-5"], ["5.5"]),
    ],
)
def test_what_is_an_answer_and_what_is_not(form, right, wrong):
    grammar = constraint(**form)
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


def test_structural_tags():
    tag = {
        "structures": [
            {"begin": "<f=add>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": "</f>"},
            {"begin": "[TOOL_CALLS]", "schema": {"type": "object"}, "end": ";"},
        ],
        "triggers": ["<f=", "[TOOL_CALLS]"],
    }
    grammar = constraint(structural_tag=tag)
    for text in ("no tag", "one <f=add>[1, 2]</f> and <f=add>[]</f>.", "", "x [TOOL_CALLS]{};"):
        assert accepts(grammar, text), text
    for text in ("<f=sub>[]</f>", "<f=add>{}</f>", "<f=add>[1]", "[TOOL_CALLS]1;"):
        assert not accepts(grammar, text), text


def test_the_end_is_allowed_when_the_answer_is_complete_and_not_earlier():
    grammar = constraint(regex="ab?")
    assert END not in allowed(grammar)
    assert grammar.accept(ord("a")) is None and END in allowed(grammar) and not grammar.terminated
    fork = grammar.fork()
    assert grammar.accept(ord("b")) is None and grammar.terminated
    assert not fork.terminated and fork.accept(END) is None and fork.terminated
    assert constraint(regex="a").accept(ord("b")) is not None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"json": "{"}, "not a JSON Schema"),
        ({"json": False}, "no answer"),
        ({"json": [1]}, "must be a JSON Schema"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "nested too deeply"),
        ({"json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
        ({"json": {"oneOf": [{}, {"type": "integer"}]}}, "anyOf"),
        ({"regex": "("}, "a regular expression cannot be read"),
        ({"regex": "(?=a)b"}, "look"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, "characters"),
        ({"choice": []}, "1 to"),
        ({"choice": "yes"}, "list of strings"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "start: ("}, "cannot be used"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "two lists"),
        ({"structural_tag": {"structures": [{"begin": "x", "end": ""}], "triggers": ["y"]}}, "none of the triggers"),
    ],
)
def test_what_cannot_be_used_says_why(form, words):
    with pytest.raises(ValueError, match=words) as caught:
        constraint(**form, field="here")
    assert str(caught.value).startswith("here ")


def test_as_many_choices_as_the_bound_says():
    grammar = constraint(choice=[f"{n * 7919} is a choice" for n in range(MAX_CHOICES)])
    assert accepts(grammar, f"{9999 * 7919} is a choice") and not accepts(grammar, "8 is a choice")
    with pytest.raises(ValueError, match=f"1 to {MAX_CHOICES} strings"):
        constraint(choice=["a"] * (MAX_CHOICES + 1))


def test_choices_that_begin_alike():
    grammar = constraint(choice=["a", "ab", "abc d"])
    for text in ("a", "ab", "abc d"):
        assert accepts(grammar, text)
    assert not accepts(grammar, "abc")


def test_tidy_leaves_properties_alone_that_have_the_names_of_keywords():
    schema = {"properties": {"format": {"type": "string", "format": "password"}, "enum": {"enum": [{"format": "x"}]}}}
    assert tidy(schema) == {"properties": {"format": {"type": "string"}, "enum": {"enum": [{"format": "x"}]}}}


def test_lenient_schemas_leave_what_cannot_be_kept_to():
    grammar = constraint(json={"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, lenient=True)
    assert accepts(grammar, "[1, 1]") and not accepts(grammar, '["x"]')


def test_params_come_from_objects():
    params = StructuredOutputsParams.of({"choice": ["a"], "field": "guided_choice"})
    assert params.choice == ["a"] and StructuredOutputsParams.of(params) is params
    with pytest.raises(ValueError, match="no field 'chioce'"):
        StructuredOutputsParams.of({"chioce": []})
