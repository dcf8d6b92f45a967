"""For models whose template knows no tools: calls as Hermes has them, and a prompt that says so.

The tools are described in a system message; calls and results in the conversation so far become text of the assistant
and of the user, because such a template may print neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import hermes
from .spec import Tool, ToolUse

SHAPE = replace(hermes.SHAPE, name="generic", taught=True)

_TEACHING = """You can call functions. To call one, write exactly this, with the name of the function and its arguments:
<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>
The result comes in the next message. These are the functions, each as a JSON object:
"""
_RULES = {
    "auto": "Call a function only if you need it; otherwise answer in words.",
    "required": "You must call a function now.",
    "named": "You must call the function {name} now.",
}


def taught(messages: Sequence[Mapping[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
    """The conversation for a template without tools."""
    plain = [_plain(message) for message in messages]
    if use is None:
        return plain
    listing = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in use.tools)
    text = f"{_TEACHING}{listing}\n{_RULES[use.mode].format(name=use.name)}"
    if plain and plain[0]["role"] == "system":
        first = plain[0]
        return [{**first, "content": f"{_text(first.get('content'))}\n\n{text}".lstrip()}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    parts = [_text(message.get("content"))] if message.get("content") else []
    for call in calls:
        function = call.get("function", {})
        arguments = function.get("arguments") or "{}"
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = SHAPE.before_name + str(function.get("name")) + SHAPE.after_name
        parts.append(SHAPE.begin + name + arguments + SHAPE.end)
    return {"role": "assistant", "content": "\n".join(parts)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False)
