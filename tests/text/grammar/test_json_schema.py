"""JSON Schema: what the public suite says of the grammars, and random answers to random schemas."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from byte_grammar import accepts, constraint, random_answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from random_schemas import SCHEMAS, leaves

SUITE = json.loads((Path(__file__).parents[2] / "data/json_schema_test_suite/draft2020-12.json").read_text())
FIXED_ORDER = {("allOf", "allOf"), ("allOf", "allOf with base schema"), ("const", "const with object")}
"""Where the suite's instance has properties in another order than the schema: an answer has them in the schema's."""


def spelled_as_float(data) -> bool:
    """Numbers with ``.0``: whole numbers are written without it in answers."""
    return isinstance(data, float) or (isinstance(data, list) and any(map(spelled_as_float, data)))


@pytest.mark.parametrize("keyword", SUITE)
def test_the_public_suite(keyword):
    covered = 0
    for group in SUITE[keyword]:
        try:
            grammar = constraint(json=group["schema"])
        except ValueError:
            continue
        covered += 1
        for description, data, valid in group["tests"]:
            if valid and (spelled_as_float(data) or (keyword, group["description"]) in FIXED_ORDER):
                continue
            found = accepts(grammar, json.dumps(data, ensure_ascii=False))
            assert found == valid, f"{group['description']}: {description}"
    assert covered >= (0.1 if keyword == "oneOf" else 0.3) * len(SUITE[keyword])


def answers_validate(schema, seed) -> None:
    """What comes to an end is valid; a schema that cannot be kept to is refused."""
    try:
        grammar = constraint(json=schema)
    except ValueError as error:
        assert str(error).startswith("structured_outputs cannot be used: ")
        return
    rng = random.Random(seed)
    for _ in range(3):
        answer = random_answer(grammar, rng)
        if answer is not None:
            jsonschema.validate(json.loads(answer), schema)


@settings(max_examples=50, suppress_health_check=list(HealthCheck), print_blob=True)
@given(SCHEMAS, st.integers(0, 2**32))
def test_random_answers_to_random_schemas_validate(schema, seed):
    answers_validate(schema, seed)


@pytest.mark.prove
@settings(max_examples=1000, suppress_health_check=list(HealthCheck), print_blob=True)
@given(SCHEMAS, st.integers(0, 2**32))
def test_random_answers_to_a_thousand_random_schemas_validate(schema, seed):
    answers_validate(schema, seed)


@settings(max_examples=60, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.data())
def test_instances_of_random_schemas_are_answers(data):
    """The other direction: what hypothesis-jsonschema makes of a schema, a model may say. (Objects are left out:
    answers have their properties in the schema's order. So are floats, which are spelled in many ways, and the
    character DEL, which the grammar library wants escaped.)"""
    schema = data.draw(leaves().filter(lambda leaf: leaf.get("type") != "number" and "format" not in leaf))
    schema = {"type": "array", "items": schema, "maxItems": 3}
    instance = data.draw(from_schema(schema))
    assert accepts(constraint(json=schema), json.dumps(instance, ensure_ascii=False).replace("\x7f", "\\u007f"))


def test_answers_are_as_wide_as_the_schema():
    """A grammar that allows little would pass the tests above."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
    grammar = constraint(json=schema)
    for text in (
        '{"a": 1}',
        '{"a":-20,"b":"\\u00e9 é"}',
        '{\n  "a": 0,\n  "b": ""\n}',
        '{"a": 1, "c": [null, {"d": 2.5e3}]}',
    ):
        assert accepts(grammar, text), text
    assert not accepts(grammar, '{"a": 1,   "b": ""}'), "blanks have a bound"
    assert accepts(constraint(json=schema, disable_any_whitespace=True), '{"a":1}')
    assert not accepts(constraint(json=schema, disable_any_whitespace=True), '{"a": 1}')
    assert not accepts(constraint(json=schema, disable_additional_properties=True), '{"a": 1, "c": 2}')
    assert accepts(constraint(json=schema, whitespace_pattern=" {0,3}"), '{"a":   1}')
