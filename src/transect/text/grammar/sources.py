"""Conversion of structured-output requests to one grammar in llguidance's form (a JSON text)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from . import lark
from .complaints import explain
from .nesting import shallow
from .params import StructuredOutputsParams

SHORT_SPACE = r"( |\r?\n[ \t]{0,40})"
"""Pattern of white space between the parts of JSON: a space, or a line break with the next line's indentation."""

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Formats of strings that grammars enforce; others constrain more than the text shows, and are left to the model, as
JSON Schema permits."""

_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are objects of schemas; in all other places an object is a schema or holds some."""
_VALUES = frozenset(("const", "enum", "default", "examples", "required", "x-guidance"))
"""Keywords whose values are not schemas."""


def grammar_of(params: StructuredOutputsParams, special_ids: Mapping[str, int] | None = None) -> str:
    """Return the grammar of an answer; ``params.grammar`` must be Lark.

    Args:
        special_ids: special tokens by their spelling, for tags.

    Raises:
        ValueError: the request cannot be read; the message begins with ``params.field``.
    """
    first = params.lark
    if first is None and params.lead is not None:
        first = f"start: lead @answer\n{params.lead}"
    if first is not None and "@answer" not in first:
        return _lark(first)
    grammar = _answer(params, special_ids or {})
    if first is None:
        return grammar
    answer = {"name": "answer", **json.loads(grammar)["grammars"][0]}
    return json.dumps({"grammars": [{"lark_grammar": first}, answer]})


def _answer(params: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    try:
        if params.json is not None:
            return _json(json_schema(params))
        if params.json_object:
            return _json(_with_options({"type": "object"}, params))
        if params.regex is not None:
            return _lark(f"start: ANSWER\nANSWER: {lark.regex(_without_anchors(params.regex))}")
        if params.choice is not None:
            # One terminal: the parser would keep an item for each string, and 2,000 is its limit.
            return _lark("start: ANSWER\nANSWER: " + " | ".join(map(lark.literal, params.choice)))
        if params.grammar is not None:
            return _lark(params.grammar)
        return _lark(structural_tag(params, special_ids))
    except RecursionError:
        raise ValueError(f"{params.field} is nested too deeply: it may be some hundred levels deep") from None


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _json(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def json_schema(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return the schema of ``params.json`` with what makes it work here.

    Raises:
        ValueError: it is not a schema.
    """
    schema = params.schema()
    if isinstance(schema, bool):
        if not schema:
            raise ValueError(f"{params.field} json is false, which no answer can satisfy")
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"{params.field} json must be an object, got {type(schema).__name__}")
    return _with_options(tidy(schema, close=params.disable_additional_properties), params)


def _with_options(schema: dict[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    space = "" if params.disable_any_whitespace else params.whitespace_pattern or SHORT_SPACE
    return with_options(schema, space, lenient=params.lenient)


def with_options(schema: dict[str, Any], space: str = SHORT_SPACE, *, lenient: bool = False) -> dict[str, Any]:
    """Add llguidance's options to a schema: white space, escapes in strings (any letter may be escaped), and refusal of
    keywords that it cannot enforce."""
    options: dict[str, Any] = {"whitespace_pattern": space} if space else {"whitespace_flexible": False}
    return {
        **shallow(schema),
        "x-guidance": {**options, "json_allow_general_unicode_escapes": True, "lenient": lenient},
    }


def tidy(schema: Any, *, close: bool = False) -> Any:
    """Copy a schema without formats that a grammar cannot enforce; ``close``: objects have no properties but the named
    ones."""
    if isinstance(schema, list):
        return [tidy(each, close=close) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if name in _SCHEMAS and isinstance(value, dict):
            result[name] = {key: tidy(each, close=close) for key, each in value.items()}
        elif name in _VALUES:
            result[name] = value
        else:
            result[name] = tidy(value, close=close)
    if close and "properties" in result:
        result.setdefault("additionalProperties", False)
    return result


def _without_anchors(pattern: str) -> str:
    """Remove ``^`` and ``$`` around a pattern, which always matches the whole answer."""
    pattern = pattern.removeprefix("^")
    ends = len(pattern) - len(pattern.rstrip("$"))
    if ends == 1 and not pattern.endswith(r"\$"):
        pattern = pattern[:-1]
    return pattern


def is_ebnf(grammar: str) -> bool:
    """Return True if a grammar must be translated (``from_ebnf``) before ``grammar_of``."""
    return "::=" in grammar


def from_ebnf(grammar: str) -> str:
    """Translate EBNF to Lark. The time grows with the square of the number of rules.

    Raises:
        ValueError: it cannot be read.
    """
    from llguidance import grammar_from

    try:
        return grammar_from("ebnf", grammar)
    except ValueError as error:
        raise ValueError(explain(str(error))) from None


def structural_tag(params: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    """Return a grammar of free text in which each trigger begins one of the tags.

    Raises:
        ValueError: the tag is not of the form that ``StructuredOutputsParams`` describes.
    """
    value, field = params.structural_tag, f"{params.field} structural_tag"
    try:
        tag = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{field} is not JSON: {error}") from None
    structures, triggers = (tag.get(name) if isinstance(tag, dict) else None for name in ("structures", "triggers"))
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise ValueError(f"{field} must have structures and triggers, two lists that are not empty")
    options = []
    for number, structure in enumerate(structures):
        begin = structure.get("begin") if isinstance(structure, dict) else None
        if not isinstance(begin, str) or not isinstance(structure.get("end"), str):
            raise ValueError(f"{field} structures[{number}] must have begin, schema and end")
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"{field} structures[{number}] begins with none of the triggers")
        schema = tidy(structure.get("schema", {}), close=params.disable_additional_properties)
        body = [lark.literal(begin[len(trigger) :], special_ids), lark.schema(_with_options(schema, params))]
        options.append((trigger, " ".join(filter(None, (*body, lark.literal(structure["end"], special_ids))))))
    return tagged_text(options, special_ids)


def tagged_text(
    options: list[tuple[str, str]], special_ids: Mapping[str, int], literal: Callable[..., str] = lark.literal
) -> str:
    """Return a grammar of free text in which a trigger is always followed by one of the expressions that go with it.

    Args:
        options: (trigger, expression of what follows).
    """
    lines = [f"TEXT: {lark.ANY_TEXT}"]
    names = []
    for number, trigger in enumerate(dict.fromkeys(trigger for trigger, _ in options)):
        rest = " | ".join(f"({expression})" for other, expression in options if other == trigger)
        names.append(f"tag_{number}")
        if trigger in special_ids:
            lines.append(f"tag_{number}: TEXT {literal(trigger, special_ids)} ({rest})")
        else:
            lines += [f"mark_{number}[lazy]: TEXT {literal(trigger)}", f"tag_{number}: mark_{number} ({rest})"]
    return "\n".join([f"start: ({' | '.join(names)})* rest", "rest: TEXT", *lines])
