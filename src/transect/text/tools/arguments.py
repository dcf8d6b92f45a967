"""Define styles of call arguments, which become JSON piece by piece; ``JSON`` is the plain style.

A style is a grammar, a reader and a writer. ``tagged.py`` and ``pythonic.py`` have the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..grammar import lark
from ..grammar.closed import closed
from ..grammar.sources import tidy, with_options
from .spec import Tool

Fixed = Callable[[str], str]
"""Function that builds an expression for exactly a text; special tokens in it are matched as tokens."""


class ArgumentReader(Protocol):
    """Reads the arguments of one call."""

    def feed(self, held: str, last: bool) -> tuple[str, str, bool]:
        """Read more of the arguments; returns (new JSON text, unread rest of ``held``, True if the arguments are
        complete)."""


class ArgumentStyle(Protocol):
    """Style in which a family writes arguments."""

    @property
    def begin(self) -> str:
        """Common beginning of all arguments; empty if there is none."""

    def grammar(self, name: str, tool: Tool, fixed: Fixed) -> tuple[str, list[str]]:
        """Return (expression, rules that it needs; their names begin with ``name``).

        Raises:
            ValueError: the tool is strict, and this style cannot keep to its parameters.
        """

    def reader(self, tool: Tool | None) -> ArgumentReader:
        """Return a reader for one call of this tool; None for an unknown tool."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of these arguments."""


class JsonArguments:
    """One JSON object."""

    begin = "{"

    def grammar(self, name: str, tool: Tool, fixed: Fixed) -> tuple[str, list[str]]:
        """Return the grammar of a tool's arguments; see ``ArgumentStyle``."""
        schema = tidy(closed(tool.parameters))
        return lark.schema(with_options(schema, lenient=not tool.strict)), []

    def reader(self, tool: Tool | None) -> ArgumentReader:
        """Return a reader for one call; see ``ArgumentStyle``."""
        return JsonReader()

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Write arguments as JSON; see ``ArgumentStyle``."""
        return json.dumps(arguments, ensure_ascii=False)


class JsonReader:
    """Returns the characters of a JSON object up to its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, held: str, last: bool) -> tuple[str, str, bool]:
        """Read more of the object; see ``ArgumentReader``."""
        for position, letter in enumerate(held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    return held[: position + 1], held[position + 1 :], True
        return held, "", False


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool, for styles that write each by itself.

    Attributes:
        schema: JSON Schema of its value, complete in itself.
        kind: ``text``: strings alone; ``json``: no strings; ``either``.
        choices: strings that it must be one of; empty: any.
    """

    name: str
    schema: Any
    required: bool
    kind: Literal["text", "json", "either"]
    choices: tuple[str, ...] = ()


_TOP = frozenset(("type", "properties", "required", "additionalProperties", "description", "title", "$defs", "$schema",
                  "definitions", "examples", "default"))  # fmt: skip
"""Keywords of an object's schema that styles with single parameters enforce, or that have no effect."""
_OF_STRINGS = ("pattern", "minLength", "maxLength", "format")


def parameters_of(tool: Tool) -> tuple[list[Parameter], bool]:
    """Return (parameters that the tool names, True if there may be others)."""
    schema = closed(tool.parameters)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    named = schema.get("properties")
    required = schema.get("required")
    found = []
    for name, each in named.items() if isinstance(named, dict) else ():
        kind, choices = _kind(each, schema)
        whole = {**each, **shared} if isinstance(each, dict) else {}
        must = isinstance(required, list) and name in required
        found.append(Parameter(name, whole, must, kind, choices))
    return found, schema.get("additionalProperties") is not False


def check_strict(tool: Tool, *, of_strings: bool) -> None:
    """Refuse a strict tool whose parameters cannot be enforced one by one; with ``of_strings``, also one that
    constrains strings.

    Raises:
        ValueError: with the keyword.
    """
    if not tool.strict:
        return
    unkept = sorted(set(tool.parameters) - _TOP)
    if of_strings:
        unkept += [
            name
            for each in parameters_of(tool)[0]
            if each.kind != "json" and not each.choices
            for name in _OF_STRINGS
            if name in each.schema
        ]
    if unkept:
        raise ValueError(
            f"tools: {tool.name} is strict, and calls of this model cannot keep to {unkept[0]!r} of its parameters: "
            "leave strict out"
        )


def value_schema(parameter: Parameter, tool: Tool) -> str:
    """Return an expression for the parameter's value as JSON."""
    return lark.schema(with_options(tidy(parameter.schema), lenient=not tool.strict))


def _kind(schema: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[Literal["text", "json", "either"], Any]:
    if not isinstance(schema, dict) or depth > 8:
        return "either", ()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _kind(target, root, depth + 1)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list) and values:
            texts = [each for each in values if isinstance(each, str)]
            if len(texts) == len(values):
                return "text", tuple(texts)
            return ("either" if texts else "json"), ()
    types = schema.get("type")
    if isinstance(types, str):
        return ("text" if types == "string" else "json"), ()
    if isinstance(types, list):
        return ("either" if "string" in types else "json"), ()
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            kinds = {_kind(each, root, depth + 1)[0] for each in schema[name]}
            return (kinds.pop() if len(kinds) == 1 else "either"), ()
    return "either", ()


JSON = JsonArguments()
