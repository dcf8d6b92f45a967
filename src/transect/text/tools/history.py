"""Conversion of calls of earlier turns to the form that a model's template accepts: ids in its format, and one call in
a message if it prints no more."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .shape import CallShape

_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NUMBERED = re.compile(r"functions\.[^:]+:[0-9]+")


def with_history(
    shape: CallShape, messages: Sequence[Mapping[str, Any]], *, apart: bool = True
) -> Sequence[Mapping[str, Any]]:
    """Return the conversation; ids may be those of another server, and several calls may have been made at once.

    Args:
        apart: split several calls into separate messages, if the template shows one call a message; else keep them
            together.
    """
    if not any(message.get("tool_calls") for message in messages):
        return messages
    if shape.ids != "call":
        messages = _renamed(shape, messages)
    return _one_by_one(messages) if shape.single and apart else messages


def _renamed(shape: CallShape, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    known: dict[Any, str] = {}
    made, result = 0, []
    for message in messages:
        copy = dict(message)
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                known[call.get("id")] = _id(shape, call, made)
                calls.append({**call, "id": known[call.get("id")]})
                made += 1
            copy["tool_calls"] = calls
        elif "tool_call_id" in message and message["tool_call_id"] in known:
            copy["tool_call_id"] = known[message["tool_call_id"]]
        result.append(copy)
    return result


def _id(shape: CallShape, call: Mapping[str, Any], number: int) -> str:
    given = str(call.get("id") or number)
    if shape.ids == "nine":
        return given if _NINE.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]
    return given if _NUMBERED.fullmatch(given) else f"functions.{call.get('function', {}).get('name')}:{number}"


def _one_by_one(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Split messages so that each call has a message of its own, followed by its result."""
    result: list[Mapping[str, Any]] = []
    waiting: dict[Any, int] = {}
    for message in messages:
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            for number, call in enumerate(calls):
                first = dict(message) if number == 0 else {"role": "assistant", "content": None}
                result.append({**first, "tool_calls": [call]})
            waiting = {call.get("id"): len(result) - len(calls) + n for n, call in enumerate(calls)}
        elif message.get("role") == "tool" and message.get("tool_call_id") in waiting:
            place = waiting.pop(message["tool_call_id"]) + 1
            result.insert(place, message)
            waiting = {name: at + (at >= place) for name, at in waiting.items()}
        else:
            result.append(message)
    return result


def single(shape: CallShape, template: str) -> CallShape:
    """Return the form, with ``single`` set if the template refuses several calls in a message, as Llama's do."""
    return replace(shape, single=True) if "only supports single tool-calls" in template else shape
