"""Chat messages: conversion from all forms of the OpenAI API to the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wants:
    """Requirements of a template on messages that most templates do not have.

    Attributes:
        parts: content is a list of text parts.
        argument_text: the arguments of calls are JSON text.
        none: a message with calls and no content has None there.
        thinking: thoughts are called ``thinking``, and stand in no message that has both calls and content.
    """

    parts: bool = False
    argument_text: bool = False
    none: bool = False
    thinking: bool = False


def normal_messages(messages: Sequence[Mapping[str, Any]], wants: Wants | None = None) -> list[dict[str, Any]]:
    """Copy the messages in the form that a template expects; by default content is a string.

    Text parts are joined with line breaks; a missing or None content becomes empty text; the arguments of tool calls,
    which the API sends as a JSON string, become the object that templates print.

    Raises:
        ValueError: not a non-empty list of objects with a role, or a content that is not text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError('messages must be a non-empty list of objects such as {"role": "user", "content": "Hello"}')
    return [_normal(message, number, wants or Wants()) for number, message in enumerate(messages)]


def _normal(message: Mapping[str, Any], number: int, wants: Wants) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise ValueError(f'{where} must be an object with "role" and "content", got {type(message).__name__}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f'{where} needs a "role" that is a non-empty string, got {role!r}')
    if "content" not in message and not message.get("tool_calls"):
        raise ValueError(f'{where} needs a "content"')
    texts = _texts(message.get("content"), where)
    result = dict(message)
    result["content"] = [{"type": "text", "text": text} for text in texts] if wants.parts else "\n".join(texts)
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_normal_call(call, where, wants.argument_text) for call in calls]
        if wants.none and not texts:
            result["content"] = None
    if wants.thinking and message.get("reasoning_content") and not (calls and texts):
        result.setdefault("thinking", message["reasoning_content"])
    return result


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}: content must be a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f'{where}: content parts must be {{"type": "text", "text": "..."}}, got one of type {kind!r}; '
                "the model reads text only"
            )
    return texts


def _normal_call(call: Any, where: str, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        raise ValueError(f"{where}: tool_calls must hold objects, got {type(call).__name__}")
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        return dict(call)
    arguments = function["arguments"]
    if isinstance(arguments, str) == as_text:
        return dict(call)
    try:
        arguments = json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
    except (ValueError, TypeError):
        return dict(call)  # models do write broken JSON: then the template prints the string as it came
    return {**call, "function": {**function, "arguments": arguments}}
