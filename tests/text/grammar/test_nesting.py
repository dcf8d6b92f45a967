"""Deep schemas, which the library's JSON parser would not read."""

import json

import pytest
from byte_grammar import accepts, constraint

from transect.text.grammar.nesting import MOST, _levels, shallow


def nested(levels, **more):
    schema = {"type": "integer"}
    for level in range(levels):
        part = {"properties": {"a": schema}, "required": ["a"]} if level % 2 else {"items": schema}
        schema = {"type": "object" if level % 2 else "array", **part, **more}
    return schema


def value(levels, inner):
    for level in range(levels):
        inner = {"a": inner} if level % 2 else [inner]
    return json.dumps(inner)


@pytest.mark.parametrize("levels", [20, 100, 180])
@pytest.mark.parametrize("text", [False, True])
def test_schemas_of_many_levels_are_kept_to(levels, text):
    schema = nested(levels)
    grammar = constraint(json=json.dumps(schema) if text else schema)
    assert accepts(grammar, value(levels, 5))
    assert not accepts(grammar, value(levels, "x"))
    assert not accepts(grammar, value(levels - 1, 5))


def test_shallow_schemas_and_those_with_places_of_their_own_are_left_as_they_are():
    for schema in (nested(20), nested(100, **{"$id": "x"}), nested(100, **{"$ref": "#/properties/a"})):
        assert shallow(schema) is schema
    schema = nested(100, **{"$defs": {"b": {"type": "string"}}})
    assert _levels(shallow(schema)) < MOST
    assert shallow(schema)["$defs"]["b"] == {"type": "string"}


def test_values_that_look_like_schemas_stay_values():
    deep = {"items": 1}
    for _ in range(60):
        deep = {"items": {"properties": deep}}
    assert shallow({"const": deep})["const"] == deep
