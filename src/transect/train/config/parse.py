"""Conversion of nested plain values to frozen dataclasses, with checks of types and messages that name the setting."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from .defaults import hint

NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
"""Names of types in error messages."""


def build(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    """Build a ``kind`` from values by name; ``where`` precedes a name in messages. ``kind.OTHER_NAMES`` has further
    names of its fields.

    Raises:
        ValueError: an unknown or missing name, or a value of another type.
    """
    kinds = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    arguments = {}
    other_names: Mapping[str, str] = getattr(kind, "OTHER_NAMES", {})
    for given, value in values.items():
        key = other_names.get(given, given)
        if key in arguments:
            raise ValueError(f"the setting {where}{key} is given twice, under two names")
        if key not in names:
            raise ValueError(f"the setting {where}{key} is not known; {hint(where, key, names)}")
        arguments[key] = _value(kinds[key], value, where + key)
    missing = [
        item.name
        for item in dataclasses.fields(kind)
        if item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
        and item.name not in arguments
    ]
    if missing:
        raise ValueError(f"the setting {where}{missing[0]} is missing")
    return kind(**arguments)


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a table, not {value!r}")
        return build(hint, value, f"{where}.")
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where} must be one of {', '.join(map(str, get_args(hint)))}, not {value!r}")
        return value
    if get_origin(hint) is tuple:
        item_kind = get_args(hint)[0]
        if isinstance(value, str) and item_kind is str:
            value = [value]
        kinds: Any = str if item_kind is str else (int, float)
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, kinds) for item in value):
            raise ValueError(f"{where} must be a list of {'strings' if item_kind is str else 'numbers'}, not {value!r}")
        return tuple(map(item_kind, value))
    if get_origin(hint) is dict:
        strings = get_args(hint)[1] is str
        if not isinstance(value, Mapping) or not all(isinstance(each, str) or not strings for each in value.values()):
            raise ValueError(f"{where} must be a table{' of strings' * strings}, not {value!r}")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, datetime.date):  # TOML's, written without quotes
        return value.isoformat()
    wanted = get_args(hint) or (hint,)
    if not any(type(value) is kind for kind in wanted):
        names = " or ".join(NAMES.get(kind, kind.__name__) for kind in wanted if kind is not type(None))
        raise ValueError(f"{where} must be {names}, not {value!r}")
    return value


def positive(config: Any, *names: str) -> None:
    """Check that these settings are at least 1. Raises ValueError."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")


def overridden(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Copy nested values with ``key=value`` settings applied; a value is TOML, or a bare word.

    Raises:
        ValueError: not of this form, or a key below something that is not a table.
    """
    made = copy.deepcopy(dict(values))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes key=value, such as optimizer.clip=0.5, not {setting!r}")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *tables, name = key.strip().split(".")
        place = made
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ValueError(f"the setting {key} is not known: {table} is not a table")
        place[name] = value
    return made
