"""Closed schemas: objects with no other properties than the named ones.

JSON Schema lets every object have more properties than it names, unless it says otherwise. A model that may invent some
does so at length, and the function that is called with them fails. So where a schema says nothing of further
properties, none are written. What such a grammar allows, the schema allows too.
"""

from __future__ import annotations

from typing import Any

_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
"""Keywords by which a schema sets its further properties itself."""
_PARTS = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef")
"""Keywords that let an object have more properties than it names."""
_OBJECTS = ("properties", "$defs", "definitions")
"""Keywords whose values are objects of schemas."""
_NAMED = (*_OBJECTS, "patternProperties", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are not schemas."""
_PLACES = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties", "contains")
"""Keywords whose values are schemas, or lists of them, for a whole value."""


def closed(schema: Any) -> Any:
    """Copy a schema, closing objects if that forbids no property that the schema names.

    A schema that puts an object together of parts with ``$ref`` is left as it is: a part would forbid what another
    names. So is one that is nested too deeply, which the compiler refuses.
    """
    try:
        return schema if _joins(schema) else _closed(schema)
    except RecursionError:
        return schema


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in _OBJECTS:
        if isinstance(schema.get(name), dict):
            result[name] = {key: _closed(each) for key, each in schema[name].items()}
    for name in _PLACES:
        # Beside properties of the object itself these are parts of it, not wholes.
        if name in schema and not (name in _PARTS and "properties" in schema):
            result[name] = _closed(schema[name])
    named = schema.get("properties")
    if (
        isinstance(named, dict)
        and not any(name in schema for name in (*_SAYS, *_PARTS))
        and set(_texts(schema.get("required"))) <= named.keys()
        and not (isinstance(schema.get("minProperties"), int) and schema["minProperties"] > len(named))
    ):
        result["additionalProperties"] = False
    return result


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _joins(schema: Any) -> bool:
    """Return True if a ``$ref`` anywhere in the schema is one of several parts of an object."""
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    parts = [each for name in ("allOf", "anyOf", "oneOf") for each in _list(schema.get(name))]
    whole = "properties" not in schema and len(_list(schema.get("allOf"))) < 2
    if not whole and ("$ref" in schema or any(isinstance(part, dict) and "$ref" in part for part in parts)):
        return True
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            value = list(value.values())
        if name not in _VALUES and _joins(value):
            return True
    return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
