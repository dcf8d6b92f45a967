"""Tools and ``tool_choice`` as requests have them, in one checked form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: letters, digits, ``_``, ``-`` and ``.``, at most 64.
        parameters: JSON Schema of its arguments, an object.
        description: for the model.
        strict: arguments keep to all of ``parameters``, or the tool is refused; else to what a grammar can keep to.
    """

    name: str
    parameters: dict[str, Any]
    description: str = ""
    strict: bool = False

    def as_openai(self) -> dict[str, Any]:
        """Return the form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Use of tools in a request.

    Attributes:
        tools: tools that may be called; the model sees all of them.
        mode: ``auto``: text, or text and then calls; ``required``: calls; ``named``: one call of ``name``.
        parallel: several calls may follow each other.
        allowed: names of the tools that may be called; None for all.
    """

    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        allowed = self.allowed if self.name is None else {self.name}
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)


def tools_of(values: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check tools in OpenAI's form, ``{"type": "function", "function": {"name": ...}}``, or with the function's fields
    at the top, as in ``/v1/responses``.

    Raises:
        ValueError: one of them is malformed; the message begins with ``tools``.
    """
    if len(values) > MAX_TOOLS:
        raise ValueError(f"tools holds {len(values)} functions; at most {MAX_TOOLS} are allowed")
    found: dict[str, Tool] = {}
    for number, value in enumerate(values):
        where = f"tools[{number}]"
        if not isinstance(value, Mapping):
            raise ValueError(f'{where} must be an object such as {{"type": "function", "function": {{"name": "f"}}}}')
        if value.get("type", "function") != "function":
            kind = str(value.get("type"))[:40]
            raise ValueError(f"{where} is of type {kind!r}; this server knows tools of type 'function' only")
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{where} must have a name of 1 to 64 letters, digits, _, - and ., got {str(name)[:80]!r}")
        if name in found:
            raise ValueError(f"{where} has the name {name!r}, which another tool has too")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise ValueError(f'{where} parameters must be a JSON Schema of {{"type": "object"}}')
        description = function.get("description")
        if not isinstance(description, (str, type(None))):
            raise ValueError(f"{where} description must be text")
        strict = function.get("strict") is True
        found[name] = Tool(name, {"type": "object", **parameters}, description or "", strict)
    return tuple(found.values())


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any = None, parallel: bool | None = None
) -> ToolUse | None:
    """Read the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None for no calls.

    Raises:
        ValueError: they are malformed or do not fit each other; the message begins with the field's name.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ValueError("tool_choice needs tools: give the functions that may be called")
        return None
    found = tools_of(tools)
    several = parallel is not False
    if choice in (None, "auto"):
        return ToolUse(found, "auto", None, several)
    if choice == "none":
        return None
    if choice == "required":
        return ToolUse(found, "required", None, several)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _some(found, choice.get("allowed_tools", choice), several)
    name = _name_in(choice)
    if not isinstance(name, str) or name not in {tool.name for tool in found}:
        names = ", ".join(tool.name for tool in found)[:200]
        raise ValueError(f"tool_choice must be none, auto, required or one of the tools ({names})")
    return ToolUse(found, "named", name, False)


def _name_in(value: Any) -> Any:
    """Return the function's name in ``{"function": {"name": ...}}`` or ``{"name": ...}``; None where there is none."""
    function = (value.get("function") or value) if isinstance(value, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _some(found: tuple[Tool, ...], asked: Any, several: bool) -> ToolUse:
    """Read ``tool_choice`` of type ``allowed_tools``: the model sees all tools, and may call some."""
    mode, listed = (asked.get("mode", "auto"), asked.get("tools")) if isinstance(asked, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise ValueError(
            "tool_choice of type allowed_tools must have a mode, auto or required, and a list of tools, such as "
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": '
            '{"name": "..."}}]}}'
        )
    known = {tool.name for tool in found}
    names = [_name_in(each) for each in listed]
    for name in names:
        if not isinstance(name, str) or name not in known:
            listing = ", ".join(tool.name for tool in found)[:200]
            raise ValueError(f"tool_choice allows {str(name)[:80]!r}, which is not one of the tools ({listing})")
    return ToolUse(found, mode, None, several, frozenset(names))
