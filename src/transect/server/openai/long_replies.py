"""Build answers with log-probabilities a few positions at a time.

Such an answer can be a hundred times as long as its text, and building it in one step would block every other stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic_core
from pydantic import BaseModel

from ...text.protocols import TokenizerLike
from ..http.sse import Raw
from .logprobs import chat_logprobs, completion_logprobs
from .replies import ChatLogprobs, ChatResponse, CompletionLogprobs, CompletionResponse

if TYPE_CHECKING:
    from ...text.outputs import PositionLogprobs

T = TypeVar("T")
PIECE = 64
"""Positions that are built between two pauses for other requests."""
NO_CHOICES, NO_LOGPROBS = b'"choices":[]', b'"logprobs":null'
"""Placeholders in a reply's JSON. Neither can occur within a JSON string, where quotes are escaped."""


async def all_chat_logprobs(
    positions: Sequence[PositionLogprobs],
    token_ids: Sequence[int],
    top: int,
    tokenizer: TokenizerLike,
    with_ids: bool = False,
) -> ChatLogprobs:
    """Build ``chat_logprobs`` of a whole answer, in pieces."""
    entries: list[Any] = []
    async for some in _pieces(list(zip(positions, token_ids, strict=True))):
        part = chat_logprobs([each[0] for each in some], [each[1] for each in some], top, tokenizer, with_ids)
        entries += part.content
    return ChatLogprobs(content=entries)


async def all_completion_logprobs(
    positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int], top: int, tokenizer: TokenizerLike
) -> CompletionLogprobs:
    """Build ``completion_logprobs`` of a whole answer, in pieces."""
    whole = completion_logprobs([], [], top, tokenizer)
    offset = 0
    async for some in _pieces(list(zip(positions, token_ids, strict=True))):
        part = completion_logprobs([each[0] for each in some], [each[1] for each in some], top, tokenizer, offset)
        offset += sum(map(len, part.tokens))
        whole.text_offset += part.text_offset
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        if whole.top_logprobs is not None:
            whole.top_logprobs += part.top_logprobs or []
    return whole


async def json_of(reply: BaseModel | Raw) -> bytes:
    """Return the bytes of ``reply.model_dump_json()``, built in pieces."""
    if not isinstance(reply, (ChatResponse, CompletionResponse)) or all(
        each.logprobs is None for each in reply.choices
    ):
        return reply.model_dump_json().encode()
    before, after = reply.model_copy(update={"choices": []}).model_dump_json().encode().split(NO_CHOICES)
    choices = [await _choice_json(choice) for choice in reply.choices]
    return b"".join((before, b'"choices":[', b",".join(choices), b"]", after))


async def _choice_json(choice: Any) -> bytes:
    logprobs: ChatLogprobs | CompletionLogprobs | None = choice.logprobs
    if logprobs is None:
        return choice.model_dump_json().encode()
    before, after = choice.model_copy(update={"logprobs": None}).model_dump_json().encode().split(NO_LOGPROBS)
    fields = [
        b'"%s":%s' % (name.encode(), b"null" if values is None else await _list_json(values, pydantic_core.to_json))
        for name, values in logprobs
    ]
    return b"".join((before, b'"logprobs":{', b",".join(fields), b"}", after))


async def _list_json(values: list[Any], to_json: Callable[[list[Any]], bytes]) -> bytes:
    return b"[" + b",".join([to_json(some)[1:-1] async for some in _pieces(values)]) + b"]"


async def _pieces(values: list[T]) -> AsyncIterator[list[T]]:
    for start in range(0, len(values), PIECE):
        yield values[start : start + PIECE]
        await asyncio.sleep(0)
