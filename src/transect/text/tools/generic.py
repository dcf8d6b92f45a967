"""Prompts for models whose template has no tools: a system message that describes them.

Calls are written as the template prints those of earlier turns. Where it prints none either, they are written as Hermes
has them, and calls and results in the conversation so far become text of the assistant and of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .families import FAMILIES
from .shape import CallShape
from .spec import Tool, ToolUse

_HERMES = next(shape for shape in FAMILIES if shape.name == "hermes")
SHAPE = replace(_HERMES, name="generic", told_by=(), taught=True)

_TEACHING = """You can call functions. To call one, write exactly this, with the name of the function and its arguments:
{example}
The result comes in the next message. These are the functions, each as a JSON object:
"""
_RULES = {
    "auto": "Call a function only if you need it; otherwise answer in words.",
    "required": "You must call a function now.",
    "named": "You must call the function {name} now.",
}


def taught(
    messages: Sequence[Mapping[str, Any]], use: ToolUse | None, shape: CallShape = SHAPE
) -> list[dict[str, Any]]:
    """Return the conversation for a template without tools."""
    plain = [dict(message) if shape.shows_calls else _plain(message, shape) for message in messages]
    if use is None:
        return plain
    listing = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in use.tools)
    example = shape.write([("NAME", "{...}")])
    text = f"{_TEACHING.replace('{example}', example)}{listing}\n{_RULES[use.mode].format(name=use.name)}"
    if plain and plain[0]["role"] == "system":
        first = plain[0]
        return [{**first, "content": f"{_text(first.get('content'))}\n\n{text}".lstrip()}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def in_system(
    shape: CallShape, messages: Sequence[Mapping[str, Any]], use: ToolUse | None
) -> Sequence[Mapping[str, Any]]:
    """Return the conversation for a template that prints the ``tools`` of the system message, and neither calls nor
    results as such."""
    plain = [_plain(message, shape) for message in messages]
    if use is None:
        return plain
    if not plain or plain[0]["role"] != "system":
        plain.insert(0, {"role": "system", "content": "You are a helpful assistant with some tools."})
    plain[0]["tools"] = json.dumps([_described(tool) for tool in use.tools], ensure_ascii=False)
    return plain


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _plain(message: Mapping[str, Any], shape: CallShape) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    parts = [_text(message.get("content"))] if message.get("content") else []
    functions = [call.get("function", {}) for call in calls]
    parts.append(shape.write((str(each.get("name")), each.get("arguments") or "{}") for each in functions))
    return {"role": "assistant", "content": "\n".join(parts)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False)
