"""All forms of tool calls by name, and which of them a chat template speaks."""

from __future__ import annotations

from . import generic, hermes, llama3, mistral
from .shape import CallShape

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
