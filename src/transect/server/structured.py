"""Requested forms of answers: ``response_format``, vLLM's ``structured_outputs`` and ``guided_...``."""

from __future__ import annotations

from typing import Any, Protocol

from ..text.grammar.closed import closed
from ..text.grammar.params import StructuredOutputsParams

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields of older vLLM clients, with their names in ``StructuredOutputsParams``."""


class StructuredFields(Protocol):
    """The fields of a body."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None


def structured_outputs(body: StructuredFields) -> StructuredOutputsParams | None:
    """Read the structured output that the body requests; None for free text.

    Raises:
        ValueError: the body requests two forms, or one that cannot be read; the message begins with the field's name.
    """
    found: list[StructuredOutputsParams] = []
    if body.response_format is not None:
        params = response_format(body.response_format)
        found += [] if params is None else [params]
    if body.structured_outputs is not None:
        given = {
            name: value for name, value in body.structured_outputs.items() if name not in ("lark", "lead", "field")
        }
        found.append(StructuredOutputsParams.of(given))
    for field, kind in GUIDED.items():
        value = getattr(body, field)
        if value is not None:
            space = body.guided_whitespace_pattern
            found.append(StructuredOutputsParams.of({kind: value, "whitespace_pattern": space, "field": field}))
    if len(found) > 1:
        raise ValueError(f"{found[1].field} and {found[0].field} both set the form of the answer: give only one")
    return found[0] if found else None


def response_format(value: Any) -> StructuredOutputsParams | None:
    """Read OpenAI's ``response_format`` (or the ``format`` of ``/v1/responses``, which has the schema one level
    higher).

    Raises:
        ValueError: not one of its forms; the message begins with its name.
    """
    field = "response_format"
    if not isinstance(value, dict):
        raise ValueError(f'{field} must be an object such as {{"type": "json_object"}}, got {str(value)[:40]!r}')
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp's server has it
        return StructuredOutputsParams.of(
            {"json_object": True, "field": field} if schema is None else {"json": schema, "field": field}
        )
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, (dict, bool)):
            form = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
            raise ValueError(f"{field} must have the schema as an object: {form}")
        lenient = isinstance(inner, dict) and inner.get("strict") is False
        return StructuredOutputsParams.of({"json": closed(schema), "field": field, "lenient": lenient})
    if kind == "structural_tag":
        tag = {name: each for name, each in value.items() if name != "type"}
        return StructuredOutputsParams.of({"structural_tag": tag, "field": field})
    raise ValueError(f"{field} type must be text, json_object or json_schema, got {str(kind)[:40]!r}")
