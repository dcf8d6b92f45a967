"""Choice of the form of tool calls, by name or by the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import generic
from .families import ALIASES, FAMILIES
from .history import single, with_history
from .shape import CallShape
from .spec import ToolUse, tool_use

SHAPES: dict[str, CallShape] = {shape.name: shape for shape in (*FAMILIES, generic.SHAPE)}


def names() -> list[str]:
    """List the values of ``--tool-call-parser``, beside ``auto``."""
    return sorted({*SHAPES, *ALIASES})


def shape_of(template: str | None, name: str = "auto") -> CallShape:
    """Return the form that a model's calls have.

    Args:
        template: the source of its chat template, or None.
        name: one of ``names()``, or ``auto``: what the template says.

    Raises:
        ValueError: there is no form of this name.
    """
    if name != "auto":
        found = SHAPES.get(ALIASES.get(name, name))
        if found is None:
            raise ValueError(f"there is no form of tool calls {name!r}; there are {', '.join(names())}, and auto")
        return found
    source = template or ""
    speaks = next((shape for shape in FAMILIES if all(text in source for text in shape.told_by)), None)
    if speaks is None or "tools" in source:
        return single(speaks or generic.SHAPE, source)
    return replace(speaks, taught=True, shows_calls=True) if "tool_calls" in source else generic.SHAPE


def with_tools(
    shape: CallShape, messages: Sequence[Mapping[str, Any]], use: ToolUse | None, *, apart: bool = True
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Return a conversation, and variables of its template, so that the model learns of tools and of calls. ``apart``:
    see
    ``with_history``."""
    messages = with_history(shape, messages, apart=apart)
    if shape.taught:
        called = any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)
        return (generic.taught(messages, use, shape) if use is not None or called else messages), {}
    if shape.in_system:
        return generic.in_system(shape, messages, use), {}
    return messages, {} if use is None else {"tools": [tool.as_openai() for tool in use.tools]}


def for_template(
    template: str | None, messages: Any, variables: Mapping[str, Any], *, apart: bool = True
) -> tuple[Any, Mapping[str, Any]]:
    """Make tools visible to the model: if its template never mentions them, put them into messages, as in serving.

    Args:
        template: the source of the chat template.
        messages: a list of messages; anything else is returned unchecked.
        variables: of the template, ``tools`` among them.
        apart: see ``with_history``; without it messages are added at the beginning alone.

    Raises:
        ValueError: the tools are malformed.
    """
    tools = variables.get("tools")
    if not isinstance(messages, Sequence) or not all(isinstance(each, Mapping) for each in messages):
        return messages, variables
    called = any(each.get("role") == "tool" or each.get("tool_calls") for each in messages)
    shape = shape_of(template)
    if not (tools or called) or not (shape.in_system or "tools" not in (template or "")):
        return with_history(shape, messages, apart=apart), variables
    rest = {name: value for name, value in variables.items() if name != "tools"}
    return with_tools(shape, messages, tool_use(tools), apart=apart)[0], rest
