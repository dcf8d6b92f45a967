"""Messages of training rows in the form of the OpenAI API, with checks of roles, calls and training flags."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .files import read_json

Messages = list[dict[str, Any]]
Row = Mapping[str, Any]

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}
"""Roles by the values of ShareGPT's ``from``."""
CALLS = ("function_call", "tool_call", "tool_calls")
"""Values of ShareGPT's ``from`` whose ``value`` is calls as JSON."""
FLAGS = ("weight", "train")
"""Keys of a message that set if it is trained on (OpenAI's and axolotl's); templates do not see them."""
USED = frozenset({"role", "content", "tool_calls", "tool_call_id", *FLAGS})
"""Keys of messages that are used with any template."""


def text_of(row: Row, key: str, *, empty: bool = False) -> str:
    """Return the string under a key. Raises ValueError for another type, or for an empty string unless ``empty``."""
    value = row.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f'"{key}" must be {"a string" if empty else "text"}, not {value!r:.60}')
    return value


def messages_of(row: Row, key: str) -> Messages:
    """Return the messages under a key, given as a list or as its JSON text. Raises ValueError for anything else."""
    value = row.get(key)
    if isinstance(value, str):  # a CSV or parquet file may hold them as JSON
        try:
            value = read_json(value)
        except ValueError as error:
            raise ValueError(f'"{key}" must be a list of messages: {error}') from None
    if not isinstance(value, Sequence) or not value or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f'"{key}" must be a list of messages')
    # Columns of a table hold null where a message has no such key.
    found = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]
    return [_with_refusal(message) for message in found]


def _with_refusal(message: dict[str, Any]) -> dict[str, Any]:
    """Use the refusal of an API message as its content, if there is one."""
    if not message.get("refusal") or message.get("content"):
        return message
    return {key: value for key, value in message.items() if key != "refusal"} | {"content": message["refusal"]}


def tools_of(row: Row) -> list[Any] | None:
    """Return the tools of a row, given as a list or as its JSON text; None if there are none. Raises ValueError for
    anything else."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = read_json(tools)
        except ValueError as error:
            raise ValueError(f'"tools" is not JSON: {error}') from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError('"tools" must be a list')
    return tools


def with_system(row: Row, messages: Messages) -> Messages:
    """Prepend the system prompt of the column ``system``. Raises ValueError if the messages begin with another one."""
    if not row.get("system"):
        return messages
    system = text_of(row, "system")
    if messages and messages[0].get("role") == "system":
        if messages[0].get("content") != system:
            raise ValueError('the row has a "system" and its messages begin with another one: leave one of them out')
        return messages
    return [{"role": "system", "content": system}, *messages]


def earlier(row: Row) -> Messages:
    """Return the turns of the column ``history``: pairs of a question and an answer, or messages; they are not trained
    on."""
    history = row.get("history")
    if isinstance(history, str) and history.strip():
        history = read_json(history)
    if not history:
        return []
    pairs = isinstance(history, Sequence) and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in history)
    if pairs and all(isinstance(text, str) for pair in history for text in pair):
        return [
            {"role": role, "content": text}
            for pair in history
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return messages_of({"history": history}, "history")


def sharegpt(row: Row) -> Messages:
    """Convert the messages of ``conversations``. Raises ValueError for an unknown speaker, or calls that are not
    JSON."""
    messages: Messages = []
    for number, turn in enumerate(messages_of(row, "conversations")):
        if "from" not in turn and "role" in turn:
            messages.append(turn)
            continue
        speaker = str(turn.get("from", "")).lower()
        role = ROLES.get(speaker)
        if role is None:
            raise ValueError(f'conversations[{number}] is "from" {turn.get("from")!r}; known are {", ".join(ROLES)}')
        rest = {key: value for key, value in turn.items() if key not in ("from", "value", "content")}
        value = text_of(turn, "value", empty=True)
        if speaker in CALLS:
            messages.append({"role": role, "content": "", "tool_calls": _calls(value, number), **rest})
        else:
            messages.append({"role": role, "content": value, **rest})
    return messages


def _calls(value: str, number: int) -> list[dict[str, Any]]:
    try:
        calls = read_json(value)
        calls = calls if isinstance(calls, list) else [calls]
        named = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'conversations[{number}] must hold a call, {{"name": ..., "arguments": {{...}}}}, or a list of them, as '
            f"JSON ({error})"
        ) from None
    return [{"type": "function", "function": call} for call in named]


def trained(messages: Messages, first: int = 0) -> tuple[Messages, frozenset[int]]:
    """Return messages without their ``FLAGS``, and the indices of assistant messages that the flags exclude from the
    loss.

    Args:
        first: messages before this one are not trained on anyway.

    Raises:
        ValueError: a flag has no meaning, or an answer that is trained on is empty.
    """
    plain: Messages = []
    masked = set()
    for number, message in enumerate(messages):
        flags = {flag: message[flag] for flag in FLAGS if flag in message}
        plain.append({key: value for key, value in message.items() if key not in FLAGS})
        own = message.get("role") == "assistant"
        for flag, value in flags.items():
            if value not in (0, 1) or isinstance(value, str):
                allowed = "0 or 1" if flag == "weight" else "true or false"
                raise ValueError(f'messages[{number}]: "{flag}" must be {allowed}, not {value!r:.60}')
            if value and not own:
                raise ValueError(
                    f'messages[{number}] is of the {message.get("role")} and has "{flag}": {json.dumps(value)}: only '
                    "the assistant's messages are trained on"
                )
            if own and not value:
                masked.add(number)
        if own and number >= first and number not in masked and _is_empty(message):
            raise ValueError(
                f"messages[{number}] is an empty answer, which would train the model to answer nothing: give it "
                '"weight": 0, or take it out'
            )
    return plain, frozenset(masked)


def _is_empty(message: Row) -> bool:
    if message.get("tool_calls") or message.get("reasoning_content") or message.get("thinking"):
        return False
    content = message.get("content")
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return all(text is None or (isinstance(text, str) and not text.strip()) for text in texts)


def check_calls(messages: Iterable[Row], tools: Sequence[Any] | None) -> None:
    """Check that a call's arguments are a JSON object, and that the called tool is among the offered ones. Raises
    ValueError."""
    offered = None if not tools else {_name(tool) for tool in tools}
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ValueError(f"messages[{number}]: tool_calls must be a list")
        for call in calls:
            name = _name(call)
            if not isinstance(name, str) or not name:
                raise ValueError(f"messages[{number}] calls a function without a name")
            if offered is not None and None not in offered and name not in offered:
                known = ", ".join(sorted(map(str, offered)))
                raise ValueError(f"messages[{number}] calls {name}, and the row's tools are {known}")
            function = call.get("function")
            arguments = (function if isinstance(function, Mapping) else call).get("arguments", {})
            try:
                arguments = read_json(arguments) if isinstance(arguments, str) else arguments
                json.dumps(arguments, allow_nan=False)  # Python's reader takes NaN and Infinity
            except (ValueError, TypeError) as error:
                raise ValueError(f"messages[{number}]: the arguments of {name} are not JSON: {error}") from None
            if not isinstance(arguments, Mapping):
                raise ValueError(f"messages[{number}]: the arguments of {name} must be a JSON object")


def _name(tool: Any) -> Any:
    """Return the name in a tool or call, with or without the ``function`` around it; None if there is none."""
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool.get("name")
