"""All settings of a run as a page, from the classes themselves: ``docs/train/settings.md``."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from .run import TrainConfig

BY_TASK = ("optimizer.learning_rate", "optimizer.weight_decay", "schedule.warmup")
"""Filled in by ``defaults.py``."""
_ENTRY = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): (.+)$")


def page() -> str:
    """Markdown: a table for each table of the file."""
    return "\n".join(_tables(TrainConfig, ""))


def meanings(kind: Any) -> dict[str, str]:
    """Read the description of each setting from a configuration class's docstring."""
    found: dict[str, str] = {}
    names: list[str] = []
    inside = False
    for line in (kind.__doc__ or "").splitlines():
        text = line.strip()
        if text == "Attributes:":
            inside = True
        elif inside and text:
            entry = _ENTRY.match(text) if line.startswith(" " * 8) and not line.startswith(" " * 9) else None
            if entry:
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, entry[2])
            else:
                found |= {name: f"{found[name]} {text}" for name in names}
    return found


def _tables(kind: Any, where: str) -> Iterator[str]:
    kinds = typing.get_type_hints(kind)
    described = meanings(kind)
    yield f"## `[{where.rstrip('.')}]`\n" if where else "## At the top\n"
    yield f"{_plain(_about(kind))}\n"
    yield "| setting | values | default | |\n|---|---|---|---|"
    inner = []
    for item in dataclasses.fields(kind):
        hint = kinds[item.name]
        if dataclasses.is_dataclass(hint):
            inner.append((hint, f"{where}{item.name}."))
            continue
        text = _plain(described[item.name]).replace("|", "\\|")
        yield f"| `{item.name}` | {_values(hint)} | {_default(item, where)} | {text} |"
    yield ""
    for hint, place in inner:
        yield from _tables(hint, place)


def _about(kind: Any) -> str:
    """The docstring up to its attributes, as one paragraph."""
    return " ".join((kind.__doc__ or "").split("Attributes:")[0].split())


def _values(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is dict:
        return "table of strings"
    if get_origin(hint) is tuple:
        return "strings" if get_args(hint)[0] is str else "numbers"
    names = {int: "whole number", float: "number", bool: "true, false", str: "string"}
    return " or ".join(names[kind] for kind in (get_args(hint) or (hint,)) if kind is not type(None))


def _default(item: dataclasses.Field[Any], where: str) -> str:
    if where + item.name in BY_TASK:
        return "by task"
    if item.default is dataclasses.MISSING:
        return "needed" if item.default_factory is dataclasses.MISSING else ""
    value = list(item.default) if isinstance(item.default, tuple) else item.default
    return "" if value in ("", [], None) else f"`{json.dumps(value)}`"


def _plain(text: str) -> str:
    """Docstrings mark code with two backticks."""
    return text.replace("``", "`")
