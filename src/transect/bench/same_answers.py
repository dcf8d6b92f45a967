"""Requests of every kind, and a comparison of two answers to one of them: for tests of servers under disturbances.

Two answers are the same if a client has the same after the last byte: texts, tokens, log-probabilities, calls, ends and
usage. Ids and times differ always. So may the cut into events: a reader that falls behind gets several tokens in one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "legs": {"type": "integer"},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "legs", "colours"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def _completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 48, **fields}


KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, _completion("The three largest cities of Europe are", temperature=0)),
    "sampled": (CHAT, _chat("Tell me a story.", top_p=0.95, top_k=50, min_p=0.01, seed=1, max_tokens=64)),
    "three choices with logprobs": (COMPLETIONS, _completion("Once upon a time", n=3, seed=2, logprobs=2)),
    "penalties": (
        CHAT,
        _chat("List ten animals.", seed=3, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.1)
        | {"max_tokens": 64},
    ),
    "stop strings": (
        COMPLETIONS,
        _completion("A long list of words:", seed=4, stop=[" the", ".", "ing"], min_tokens=12, max_tokens=64),
    ),
    "a JSON schema": (
        CHAT,
        _chat("Describe an animal as JSON.", seed=5, max_tokens=96)
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}},
    ),
    "tools": (
        CHAT,
        _chat("How is the weather in Paris?", seed=6, max_tokens=96, tools=[TOOL], tool_choice="required"),
    ),
    "bytes inside characters": (COMPLETIONS, _completion("Emoji: 🦑🦐", seed=7, temperature=1.6)),
    "two prompts": (COMPLETIONS, _completion(["Red is", "Blue is"], seed=8, ignore_eos=True, max_tokens=32)),
    "the responses API": (
        "/v1/responses",
        {"input": "Name a river.", "temperature": 0, "max_output_tokens": 48, "stream": True},
    ),
    "the messages API": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Name a mountain."}], "temperature": 0, "max_tokens": 48}
        | {"stream": True},
    ),
    "in one piece": (COMPLETIONS, {"prompt": "The sea is", "seed": 9, "max_tokens": 48, "prompt_logprobs": 1}),
    "beam search": (
        COMPLETIONS,
        {"prompt": "My name is", "use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 10},
    ),
    "embeddings": ("/v1/embeddings", {"input": ["A sentence.", "Another one."]}),
}
"""Paths and bodies by name, without ``model``. Every draw has a seed, so that answers can be compared."""

_IDS = re.compile(rb'"(chatcmpl|cmpl|resp|msg|call|fc|rs|embd|toolu)[-_][0-9A-Za-z_-]+"')
_TIMES = re.compile(rb'"created(_at)?": ?\d+')
_TEXTS = {"text", "content", "reasoning_content", "reasoning", "arguments", "delta", "partial_json", "thinking"}


@dataclass
class Answer:
    """The answer to one request, as received by its client."""

    status: int = 0
    value: Any = None
    """Folded events, or the whole body."""
    pieces: int = 0
    """Number of events, or 1."""
    longest_gap_s: float = 0.0
    """Longest time between two pieces, or before the only one."""
    comments: list[str] = field(default_factory=list)
    clean: bool = False
    """True if the answer is complete: ``[DONE]``, or the last event of its API, or the whole body."""
    text: str = ""
    """Text of the first choice so far."""

    def same_as(self, other: Answer) -> bool:
        """Return True if the clients of both answers received the same."""
        return self.clean and other.clean and (self.status, self.value) == (other.status, other.value)


async def ask(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], seen: Callable[[Answer], None] = lambda answer: None
) -> Answer:
    """Send a request and read its answer. ``seen``: called after each piece."""
    answer = Answer()
    began = time.perf_counter()
    if not body.get("stream"):
        response = await client.post(path, json=body)
        answer.status, answer.value = response.status_code, json.loads(plain(response.content))
        answer.longest_gap_s, answer.pieces, answer.clean = time.perf_counter() - began, 1, True
        seen(answer)
        return answer
    total: dict[str, Any] = {}
    async with client.stream("POST", path, json=body) as response:
        answer.status = response.status_code
        async for line in response.aiter_lines():
            now = time.perf_counter()
            if line.startswith(":"):
                answer.comments.append(line)
            if not line.startswith("data: "):
                continue
            if answer.pieces:
                answer.longest_gap_s = max(answer.longest_gap_s, now - began)
            began = now
            answer.pieces += 1
            if line == "data: [DONE]":
                answer.clean = True
                continue
            event = json.loads(plain(line.removeprefix("data: ").encode()))
            kind = event.get("type", "") if isinstance(event.get("type"), str) else ""
            if kind == "message_start":  # the count so far goes by the cut into events
                event["message"]["usage"].pop("output_tokens", None)
            answer.clean = kind in ("message_stop", "response.completed", "response.incomplete")
            _fold(total.setdefault(f"{kind} {event.get('index', event.get('output_index', ''))}", {}), event)
            answer.text += _text_of(event)
            seen(answer)
    answer.value = total
    return answer


def plain(body: bytes) -> bytes:
    """Remove ids and times from a body."""
    return _TIMES.sub(rb'"created\1": 0', _IDS.sub(rb'"\1"', body))


def _fold(total: dict[str, Any], event: dict[str, Any]) -> None:
    """Fold an event into the earlier ones."""
    for key, value in event.items():
        before = total.get(key)
        if key == "sequence_number":
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            _fold(before, value)
        elif isinstance(value, list) and all(isinstance(each, dict) and "index" in each for each in value):
            places = total[key] = before if isinstance(before, dict) else {}
            for each in value:
                _fold(places.setdefault(str(each["index"]), {}), each)
        elif isinstance(value, list) and isinstance(before, list):
            before.extend(value)
        elif isinstance(value, str) and isinstance(before, str) and key in _TEXTS:
            total[key] = before + value
        elif value is not None or key not in total:
            total[key] = value


def _text_of(event: dict[str, Any]) -> str:
    """Return the new text of the first choice, for display."""
    for choice in event.get("choices") or ():
        if choice["index"] == 0:
            delta = choice.get("delta") or {}
            calls = "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ())
            return str(choice.get("text") or delta.get("content") or "") + calls
    delta = event.get("delta")
    return delta if isinstance(delta, str) else str((delta or {}).get("text") or "")
