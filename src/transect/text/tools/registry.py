"""All forms of tool calls by name, and which of them a chat template speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import generic, hermes, llama3, mistral
from .shape import CallShape
from .spec import tool_use

SHAPES: dict[str, CallShape] = {
    shape.name: shape for shape in (hermes.SHAPE, llama3.SHAPE, mistral.SHAPE, generic.SHAPE)
}
ALIASES = {"qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "llama3": "llama3_json"}


def names() -> list[str]:
    """What ``--tool-call-parser`` takes, beside ``auto``."""
    return sorted({*SHAPES, *ALIASES})


def shape_of(template: str | None, name: str = "auto") -> CallShape:
    """The form that a model's calls have.

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
    if "tools" not in source:
        return generic.SHAPE
    if "[TOOL_CALLS]" in source:
        return mistral.SHAPE
    if "<tool_call>" in source:
        return hermes.SHAPE
    if "ipython" in source and "parameters" in source:
        return llama3.SHAPE
    return generic.SHAPE


def for_template(template: str | None, messages: Any, variables: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """A conversation and its variables so that tools reach the model: where its template never mentions them, messages
    do, as they do when it serves.

    Args:
        template: the source of the chat template.
        messages: a list of messages; anything else is left to whoever checks it.
        variables: of the template, ``tools`` among them.

    Raises:
        ValueError: the tools are malformed.
    """
    tools = variables.get("tools")
    if not isinstance(messages, Sequence) or not all(isinstance(each, Mapping) for each in messages):
        return messages, variables
    called = any(each.get("role") == "tool" or each.get("tool_calls") for each in messages)
    if not (tools or called) or "tools" in (template or ""):
        return messages, variables
    rest = {name: value for name, value in variables.items() if name != "tools"}
    return generic.taught(messages, tool_use(tools)), rest
