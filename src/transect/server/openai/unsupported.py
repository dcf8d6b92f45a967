"""Refuse fields that this server does not support, and name each by its purpose.

Many clients send every field of their API, most of them empty. An empty field changes nothing and is accepted. A field
that would change the answer is refused, because an answer that ignores it would be wrong without notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

EMPTY: dict[str, tuple[Any, ...]] = {
    "cache_salt": ("",),
    "documents": ([],),
    "extra_body": ({},),
    "guided_options_request": ({},),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Fields of other servers, each with the values at which the field has no effect; null always has none."""

IGNORED = frozenset(("cache_control", "request_id", "extra_headers", "extra_query", "timeout"))
"""Fields that do not affect the answer: hints to caches of other servers, names for logs, settings of clients."""

WORDS = {
    "audio": "audio output",
    "best_of": "drawing best_of answers and returning the best",
    "documents": "giving documents to the chat template",
    "function_call": "function calling",
    "functions": "function calling",
    "kv_transfer_params": "moving KV caches between servers",
    "length_penalty": "beam search",
    "logits_processors": "running logits processors of the client's",
    "modalities": "any output but text",
    "reasoning_effort": "setting how long the model reasons",
    "response_format": "structured output",
    "suffix": "filling in text before a suffix anywhere but in /v1/completions",
    "tool_calls": "tool calling",
    "tool_choice": "tool calling",
    "tools": "tool calling",
    "use_beam_search": "beam search",
    "verbosity": "setting the length of answers",
    "web_search_options": "web search",
}
"""Purpose of each field, for error messages."""


def asks_for_nothing(value: Any, nothings: Iterable[Any]) -> bool:
    """Return True if a value is null or one of ``nothings``; 1 equals 1.0, but true is not 1."""
    if value is None:
        return True
    return any(value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in nothings)


def sentence(name: str) -> str:
    """Return the error message for a field that is set."""
    what = WORDS.get(name)
    subject = f"{what} ({name})" if what else name
    return f"{subject} is not supported by this server: leave it out"
