"""Arguments as those of a call in Python: ``city="Rome", days=3``, of Llama 4 and of Llama 3.2 if asked so.

Truth values and nothing are spelled as in Python; strings, lists and objects as in JSON, which the reader also takes in
Python's spelling.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from ..grammar import lark
from .arguments import ArgumentReader, Fixed, Parameter, check_strict, parameters_of, value_schema
from .spec import Tool

_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}
_KEY = re.compile(r"[\s,]*([^\s=,()]+)\s*=\s*")


class PythonArguments:
    """Arguments of the form ``NAME=VALUE``, separated by ``, ``."""

    begin = ""

    def grammar(self, name: str, tool: Tool, fixed: Fixed) -> tuple[str, list[str]]:
        """Return the grammar of a tool's arguments, see ``ArgumentStyle``. Parameters come in the order of the
        schema."""
        check_strict(tool, of_strings=False)
        parameters, more = parameters_of(tool)
        # first_i: nothing has been written before parameter i; next_i: something has.
        rules = []
        for number, each in enumerate(parameters):
            rules.append(f"{name}_{number}: {fixed(each.name + '=')} ({_value(each, tool)})")
            written, skipped = f"{name}_{number} {name}_next_{number + 1}", f" | {name}_first_{number + 1}"
            rules.append(f"{name}_first_{number}: {written}" + ("" if each.required else skipped))
            after = f'", " {written}'
            rules.append(f"{name}_next_{number}: {after}" + ("" if each.required else f" | {name}_next_{number + 1}"))
        other = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {lark.schema({})}'
        rules.append(f"{name}_first_{len(parameters)}: " + (f'(({other}) (", " {other})*)?' if more else '""'))
        rules.append(f"{name}_next_{len(parameters)}: " + (f'(", " {other})*' if more else '""'))
        return f"{name}_first_0", rules

    def reader(self, tool: Tool | None) -> ArgumentReader:
        """Return a reader for one call; see ``ArgumentStyle``."""
        return _PythonReader()

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Write arguments in Python's syntax; see ``ArgumentStyle``."""
        return ", ".join(
            f"{name}={value if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)}"
            for name, value in arguments.items()
        )


def _value(parameter: Parameter, tool: Tool) -> str:
    """Return an expression for a value: JSON, except for constants that Python spells differently."""
    types = _types(parameter.schema)
    words = [word for kind, word in _WORDS.items() if kind in types]
    return " | ".join([*words, value_schema(parameter, tool)] if types - _WORDS.keys() or not types else words)


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names at its top."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", ())
    parts = [each for name in ("anyOf", "oneOf") for each in schema.get(name) or ()]
    return ({named} if isinstance(named, str) else set(named)).union(*map(_types, parts))


class _PythonReader:
    """Returns each argument when it is complete."""

    def __init__(self) -> None:
        self._opened = False
        self._at = self._depth = 0
        self._quote = ""

    def feed(self, held: str, last: bool) -> tuple[str, str, bool]:
        """Read more of the arguments; see ``ArgumentReader``."""
        news = ""
        while True:
            end = self._end(held)
            if end is None:
                return news, held, False
            news += self._argument(held[:end])
            if held[end] == ")":
                return news + ("}" if self._opened else "{}"), held[end:], True
            held = held[end + 1 :]

    def _end(self, held: str) -> int | None:
        """Find the end of the argument at the beginning of ``held``: a comma or a bracket outside of it."""
        while self._at < len(held):
            letter, here = held[self._at], self._at
            self._at += 1
            if self._quote:
                if letter == "\\":
                    if self._at == len(held):
                        self._at -= 1  # what it escapes has not come yet
                        return None
                    self._at += 1
                elif letter == self._quote:
                    self._quote = ""
            elif letter in "\"'":
                self._quote = letter
            elif letter in "([{":
                self._depth += 1
            elif (letter == "," or letter == ")") and not self._depth:
                self._at = 0
                return here
            elif letter in ")]}":
                self._depth -= 1
        return None

    def _argument(self, text: str) -> str:
        found = _KEY.match(text)
        if found is None:
            return ""
        news = (", " if self._opened else "{") + json.dumps(found[1], ensure_ascii=False) + ": "
        self._opened = True
        return news + _as_json(text[found.end() :].strip())


def _as_json(text: str) -> str:
    try:
        json.loads(text)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)
