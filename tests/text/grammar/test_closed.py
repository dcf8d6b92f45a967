"""Which objects of a schema are closed, and that no answer is lost that the schema names."""

import pytest

from transect.text.grammar.closed import closed

A, B = {"type": "integer"}, {"type": "string"}
OPEN = {"type": "object", "properties": {"a": A}}
SHUT = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "result"),
    [
        (OPEN, SHUT),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object", "properties": {"o": OPEN}, "required": ["o"]}, None),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": SHUT}),
        ({"anyOf": [OPEN, A]}, {"anyOf": [SHUT, A]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": OPEN}}, {"$ref": "#/$defs/x", "$defs": {"x": SHUT}}),
        (
            {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": OPEN}},
            {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": SHUT}},
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": OPEN}},
            {"oneOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": SHUT}},
        ),
    ],
)
def test_closed(schema, result):
    if result is None:
        result = {**schema, "properties": {"o": SHUT}, "additionalProperties": False}
    assert closed(schema) == result


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": A},
        {**OPEN, "patternProperties": {"^x": B}},
        {**OPEN, "unevaluatedProperties": False},
        {**OPEN, "required": ["b"]},
        {**OPEN, "minProperties": 2},
        {"allOf": [OPEN, {"properties": {"b": B}}]},
        {**OPEN, "anyOf": [{"properties": {"b": B}, "required": ["b"]}, {"required": ["a"]}]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": B}}], "$defs": {"x": OPEN}},
        {"$ref": "#/$defs/x", "properties": {"b": B}, "$defs": {"x": OPEN}},
        {"const": OPEN},
        {"enum": [{"properties": {"a": 1}}]},
        {**OPEN, "if": {"properties": {"a": A}}, "then": {"properties": {"b": B}}},
        True,
    ],
)
def test_left_as_it_is(schema):
    assert closed(schema) == schema


def test_a_property_may_have_any_name():
    schema = {"type": "object", "properties": {"properties": OPEN, "allOf": A, "$ref": B}}
    assert closed(schema) == {
        "type": "object",
        "properties": {"properties": SHUT, "allOf": A, "$ref": B},
        "additionalProperties": False,
    }


def test_what_is_nested_too_deeply_is_left_to_the_compiler():
    schema = OPEN
    for _ in range(5000):
        schema = {"items": schema}
    assert closed(schema) is schema
