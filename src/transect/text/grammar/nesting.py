"""Conversion of deep schemas to shallow ones. llguidance reads 128 levels of JSON; a schema has two for each level of
objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOST = 96
"""Most levels of a schema that is left unchanged. The rest of 128 is for what grammars put around schemas."""
STEP = 32
"""Levels of a part."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are objects of schemas."""
_PLACES = frozenset(
    ("items", "prefixItems", "additionalItems", "anyOf", "oneOf", "allOf", "additionalProperties", "contains",
     "unevaluatedProperties", "unevaluatedItems", "propertyNames", "not", "if", "then", "else")
)  # fmt: skip
"""Keywords whose values are schemas, or lists of them."""
_SIMPLE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")
"""References that stay valid wherever a part of the schema is moved."""


def shallow(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema with few levels: deep parts become definitions.

    A schema is left as it is where that could change its meaning: it has an ``$id``, or a reference to a place that is
    not a definition.
    """
    if _levels(schema) <= MOST or not all(map(_may_move, _dicts(schema))):
        return schema
    parts: dict[str, Any] = {}
    result: dict[str, Any] = _cut(schema, 0, parts)
    return {**result, "$defs": {**result.get("$defs", {}), **parts}}


def _cut(schema: Any, level: int, parts: dict[str, Any]) -> Any:
    """Copy a schema without the parts deeper than STEP, which are moved to ``parts``."""
    if isinstance(schema, list):
        return [_cut(each, level + 1, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if level > STEP:
        name = f"part-{len(parts) + 1}-of-a-deep-schema"
        parts[name] = None  # takes the name, before parts of this part do
        parts[name] = _cut(schema, 0, parts)
        return {"$ref": f"#/$defs/{name}"}
    result = dict(schema)
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            result[name] = {key: _cut(each, level + 2, parts) for key, each in value.items()}
        elif name in _PLACES:
            result[name] = _cut(value, level + 1, parts)
    return result


def _may_move(part: dict[str, Any]) -> bool:
    reference = part.get("$ref")
    return "$id" not in part and (not isinstance(reference, str) or _SIMPLE.fullmatch(reference) is not None)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)


def _levels(value: Any) -> int:
    level, count = [value], 0
    while level:
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
        count += 1
    return count
