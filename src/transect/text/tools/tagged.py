r"""Arguments between tags, strings as plain text and other values as JSON: Qwen3-Coder's
``<parameter=NAME>\nVALUE\n</parameter>``, GLM-4.5's ``<arg_key>NAME</arg_key>\n<arg_value>VALUE</arg_value>``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..grammar import lark
from .arguments import ArgumentReader, Fixed, Parameter, check_strict, parameters_of, value_schema
from .spec import Tool

_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments of the form ``before_name + NAME + after_name + VALUE + end + between``; blanks around ``between`` do
    not matter."""

    before_name: str
    after_name: str
    end: str
    between: str = "\n"
    begin: str = ""

    def grammar(self, name: str, tool: Tool, fixed: Fixed) -> tuple[str, list[str]]:
        """Return the grammar of a tool's arguments, see ``ArgumentStyle``. Parameters come in the order of the
        schema."""
        check_strict(tool, of_strings=True)
        parameters, more = parameters_of(tool)
        end = fixed(self.end + self.between)
        rules = lark.until(f"{name}_any", end)
        expression = []
        for number, each in enumerate(parameters):
            if each.choices:
                value = f"({' | '.join(map(fixed, each.choices))}) {end}"
            elif each.kind == "json":
                value = f"{value_schema(each, tool)} {end}"
            else:
                value = f"{name}_any"
            rules.append(f"{name}_{number}: {fixed(self.before_name + each.name + self.after_name)} {value}")
            expression.append(f"{name}_{number}" if each.required else f"{name}_{number}?")
        if more:
            rules.append(
                f"{name}_more: {fixed(self.before_name)} /[^<>\\s]{{1,64}}/ {fixed(self.after_name)} {name}_any"
            )
            expression.append(f"{name}_more*")
        return " ".join(expression), rules

    def reader(self, tool: Tool | None) -> ArgumentReader:
        """Return a reader for one call; see ``ArgumentStyle``."""
        return _TaggedReader(self, {} if tool is None else {each.name: each for each in parameters_of(tool)[0]})

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Write arguments between tags; see ``ArgumentStyle``."""
        texts = (
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in arguments.items()
        )
        return "".join(
            self.before_name + name + self.after_name + text + self.end + self.between for name, text in texts
        )


class _TaggedReader:
    """Returns strings as they arrive, and other values when they are complete."""

    def __init__(self, style: TaggedArguments, parameters: Mapping[str, Parameter]) -> None:
        self._style, self._parameters = style, parameters
        self._opened = False
        self._inside: Parameter | None = None
        """Parameter whose value is being read."""
        self._value_begun = False

    def feed(self, held: str, last: bool) -> tuple[str, str, bool]:
        """Read more of the arguments; see ``ArgumentReader``."""
        news = ""
        while True:
            if self._inside is None:
                step = self._name(held)
                if step is None:
                    return news, held, False
                news, held, done = news + step[0], step[1], step[2]
                if done:
                    return news, held, True
            else:
                more, held, ended = self._value(self._inside, held, last)
                news += more
                if not ended:
                    return news, held, False
                self._inside = None

    def _name(self, held: str) -> tuple[str, str, bool] | None:
        """Read up to a value, or to the end of the arguments; None if more text is needed."""
        style, rest = self._style, held.lstrip()
        before, after = style.before_name, style.after_name.strip()
        if not rest or (before.startswith(rest) and rest != before):
            return None
        if not rest.startswith(before):
            return ("}" if self._opened else "{}"), rest, True
        name, found, value = rest[len(before) :].partition(after)
        blank = style.after_name[len(style.after_name.rstrip()) :]
        if not found or (blank and not value):
            return None
        name = name.strip()
        self._inside = self._parameters.get(name, Parameter(name, {}, False, "either"))
        news = (", " if self._opened else "{") + json.dumps(name, ensure_ascii=False) + ": "
        self._opened, self._value_begun = True, False
        return news, value.removeprefix(blank), False

    def _value(self, parameter: Parameter, held: str, last: bool) -> tuple[str, str, bool]:
        """Read more of a value; returns (new JSON, unread rest, True if the value is complete)."""
        blank = self._style.end[: len(self._style.end) - len(self._style.end.lstrip())]
        mark = self._style.end.lstrip()
        at = held.find(mark)
        text = held if at < 0 else held[:at].removesuffix(blank)
        if parameter.kind != "text":
            return ("", held, False) if at < 0 else (_as_json(text, parameter), held[at + len(mark) :], True)
        if at < 0:
            sizes = range(min(len(blank + mark) - 1, len(held)), 0, -1)
            keep = 0 if last else next((n for n in sizes if (blank + mark).startswith(held[-n:])), 0)
            text = held[: len(held) - keep]
        opening = "" if self._value_begun or not (text or at >= 0) else '"'
        self._value_begun = self._value_begun or bool(opening)
        news = opening + json.dumps(text, ensure_ascii=False)[1:-1]
        return (news, held[len(text) :], False) if at < 0 else (news + '"', held[at + len(mark) :], True)


def _as_json(text: str, parameter: Parameter) -> str:
    """Convert a value that need not be a string: JSON if it is valid, a Python constant, or else a string."""
    written = _WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) and parameter.kind == "either" else written
