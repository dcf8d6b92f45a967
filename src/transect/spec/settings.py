"""Settings: fields of frozen dataclasses, from which options, checks, pages and other engines' names are derived.

A setting is written once: a field with its type, range and default, and an entry below ``Attributes:`` in the docstring
of its class. The first sentence of the entry is the help text of the option.

    @dataclass(frozen=True)
    class Example:
        '''Limits of an example.

        Attributes:
            rows: Rows in a batch. More rows need more memory.
        '''

        GROUPS = {"rows": "Limits"}
        rows: Annotated[int, About(least=1)] = 8

``settings_of`` reads such a class, ``check_values`` checks an object of it, ``table`` and
``options_table`` write pages.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin

_ENTRY = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): (.+)$")
NOUNS = {int: "whole number", float: "number", bool: "true, false", str: "string"}


@dataclass(frozen=True, slots=True)
class About:
    """Facts about a field besides its type and default, for ``Annotated``.

    Attributes:
        least: smallest value.
        above: the value is greater than this.
        most: greatest value.
        choices: gives the names to choose from, for fields whose type does not list them.
        option: name of the command-line option, if it differs from the field's name without ``_s``.
        short: short flag, such as ``-tp``.
        also: further names of the setting, those of vLLM's arguments among them.
        variable: an environment variable besides that of the option.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Callable[[], Iterable[str]] | None = None
    option: str = ""
    short: str = ""
    also: tuple[str, ...] = ()
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a dataclass of settings.

    Attributes:
        name: name of the field.
        kinds: types of its values, without None; values of a ``Literal`` as they are.
        optional: None is a value.
        default: value if unset; ``dataclasses.MISSING`` if the field must be given, or makes a new object.
        required: the field must be given.
        meaning: text of its entry in the docstring.
        group: heading below which it is shown.
        about: other facts.
    """

    name: str
    kinds: tuple[Any, ...]
    optional: bool
    default: Any
    required: bool
    meaning: str
    group: str
    about: About

    @property
    def option(self) -> str:
        """Name of the option, without dashes in front."""
        return self.about.option or self.name.removesuffix("_s").replace("_", "-")

    @property
    def help(self) -> str:
        """First sentence of the meaning, without marks for code."""
        return re.split(r"(?<=[^.]\.) ", self.meaning, maxsplit=1)[0].replace("``", "")

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values to choose from; empty if any value of the type will do."""
        if self.about.choices is not None:
            return tuple(self.about.choices())
        return tuple(kind for kind in self.kinds if isinstance(kind, str | int))

    @property
    def values(self) -> str:
        """Possible values, as pages show them."""
        names = [f"`{each}`" for each in self.choices]
        for kind in self.kinds:
            if isinstance(kind, str | int) or (kind is str and names):
                continue
            if kind is Any:
                names.append("table")
                continue
            if get_origin(kind) is tuple:
                names.append("strings" if get_args(kind)[0] is str else "numbers")
            elif get_origin(kind) in (dict, Mapping):
                names.append("table of strings" if get_args(kind)[1] is str else "table")
            else:
                names.append(NOUNS[kind])
        return (", " if self.choices and len(names) == len(self.choices) else " or ").join(names)


@cache
def settings_of(kind: Any) -> tuple[Setting, ...]:
    """Return the settings in a dataclass, in order; fields that are dataclasses themselves are excluded."""
    hints = typing.get_type_hints(kind, include_extras=True)
    described = meanings(kind)
    groups: Mapping[str, str] = getattr(kind, "GROUPS", {})
    found, group = [], ""
    for field in dataclasses.fields(kind):
        group = groups.get(field.name, group)
        hint = hints[field.name]
        about = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, About)), About())
        plain = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        if dataclasses.is_dataclass(plain):
            continue
        kinds = tuple(_kinds(plain))
        optional = type(None) in kinds
        kinds = tuple(each for each in kinds if each is not type(None))
        meaning = described.get(field.name, "")
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        found.append(Setting(field.name, kinds, optional, field.default, required, meaning, group, about))
    return tuple(found)


def _kinds(hint: Any) -> Iterator[Any]:
    """Yield members of a union and values of a ``Literal``."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        for each in get_args(hint):
            yield from _kinds(each)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        yield hint


def meanings(kind: Any) -> dict[str, str]:
    """Return entries below ``Attributes:`` in the docstring of a class and of those that it extends, by name."""
    found: dict[str, str] = {}
    for base in kind.__bases__:
        found |= meanings(base) if dataclasses.is_dataclass(base) else {}
    names: list[str] = []
    inside = False
    for line in (kind.__doc__ or "").splitlines():
        text = line.strip()
        if line and not line.startswith("     "):
            inside = text == "Attributes:"
        elif inside and text:
            entry = _ENTRY.match(text) if line.startswith(" " * 8) and not line.startswith(" " * 9) else None
            if entry:
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, entry[2])
            else:
                found |= {name: f"{found[name]} {text}" for name in names}
    return found


def check_values(config: Any) -> None:
    """Check choices and ranges of an object of a dataclass of settings.

    Raises:
        ValueError: a value is out of range; the message says what is possible.
    """
    for setting in settings_of(cast(Any, type(config))):
        value, about = getattr(config, setting.name), setting.about
        if value is None and setting.optional:
            continue
        literals = tuple(kind for kind in setting.kinds if isinstance(kind, str | int))
        if literals and len(literals) == len(setting.kinds) and value not in literals:
            raise ValueError(f"{setting.name} must be {_listed(literals)}, not {value!r}")
        bounds = [
            *([] if about.above is None else [f"above {about.above:g}"]),
            *([] if about.least is None else [f"of at least {about.least:g}"]),
            *([] if about.most is None else [f"at most {about.most:g}"]),
        ]
        if bounds and not _fits(value, int if int in setting.kinds else float, about):
            noun = "a whole number" if int in setting.kinds else "a number"
            raise ValueError(f"{setting.name} must be {noun} {' and '.join(bounds)}, not {value!r}")
        if setting.kinds == (bool,) and not isinstance(value, bool):
            raise ValueError(f"{setting.name} must be True or False, not {value!r}")


def _fits(value: Any, kind: type, about: About) -> bool:
    """Return True if a number is of a kind and within its bounds."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    low = -math.inf if about.least is None else about.least
    above = -math.inf if about.above is None else about.above
    return value >= low and (about.above is None or value > above) and (about.most is None or value <= about.most)


def _listed(names: Iterable[Any]) -> str:
    *rest, last = map(str, names)
    return f"{', '.join(rest)} or {last}" if rest else last


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name most like ``name``; empty if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def changed_fields(config: Any) -> list[str]:
    """List ``name=value`` for each field that differs from its default, in order; nested settings as their own text."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found += [str(value)] if str(value) else []
        elif field.default is dataclasses.MISSING or value != field.default:
            found.append(f"{field.name}={value}")
    return found


def table(kind: Any, where: str = "", by_task: Iterable[str] = ()) -> Iterator[str]:
    """Yield lines of Markdown: a table of the settings in a dataclass, then those of the dataclasses in it.

    Args:
        kind: the dataclass.
        where: names of the tables of a TOML file that it is in, with a dot after each.
        by_task: settings whose defaults depend on the task of a training run, with ``where`` in front.
    """
    yield f"## `[{where.rstrip('.')}]`\n" if where else "## At the top\n"
    about = (kind.__doc__ or "").split("Attributes:")[0]
    yield f"{' '.join(about.split()).replace('``', '`')}\n"
    yield "| setting | values | default | |\n|---|---|---|---|"
    for each in settings_of(kind):
        default = "by task" if where + each.name in by_task else _default(each)
        yield f"| `{each.name}` | {each.values} | {default} | {_cell(each)} |"
    yield ""
    for name, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from table(inner, f"{where}{name}.", by_task)


def options_table(*kinds: Any, without: Iterable[str] = (), unnamed: Iterable[str] = ()) -> Iterator[str]:
    """Yield lines of Markdown: a table for each group of settings in dataclasses, with the names of options and of
    fields.

    Args:
        kinds: the dataclasses.
        without: fields to leave out.
        unnamed: fields that no option sets.
    """
    groups: dict[str, list[str]] = {}
    for kind in kinds:
        for each in settings_of(kind):
            if each.name not in without:
                names = [] if each.name in unnamed else [each.option, *each.about.also]
                options = ", ".join(f"`--{name.replace('_', '-')}`" for name in names)
                row = f"| {options} | `{each.name}` | {each.values} | {_default(each)} | {_cell(each)} |"
                groups.setdefault(each.group, []).append(row)
    for title, rows in groups.items():
        yield f"### {title}\n\n| option | field | values | default | |\n|---|---|---|---|---|"
        yield from (*rows, "")


def _cell(setting: Setting) -> str:
    return setting.meaning.replace("``", "`").replace("|", "\\|")


def _default(setting: Setting) -> str:
    if setting.default is dataclasses.MISSING:
        return "needed" if setting.required else ""
    value = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    return "" if value in ("", [], None) else f"`{json.dumps(value)}`"
