"""``POST /v1/messages``: Anthropic's API over the same engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from ..blocks import Block, Conversation, News
from ..http.errors import ApiError
from ..http.lifetime import Deadline
from ..http.sse import CONTINUED, Raw, named_event
from ..prompts import chat_prompt
from ..searches import requested_search
from ..serving import Serving
from .protocol import ID_PREFIX, CountRequest, MessagesRequest

_DELTAS = {
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


async def count_tokens(serving: Serving, body: CountRequest) -> int:
    """Count the tokens of the prompt that the messages make.

    Raises:
        ApiError: the messages are at fault.
    """
    goes_on = body.begins_the_answer
    prompt = await chat_prompt(
        serving,
        body.conversation(),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        template_kwargs=body.template_kwargs(),
        use=body.tool_use(),
    )
    return len(prompt.token_ids)


def error_event(error: ApiError) -> bytes:
    """Write an error in the middle of a stream as an event."""
    return named_event("error", {"type": "error", **error.body})


class Messages:
    """One request."""

    def __init__(self, serving: Serving, body: MessagesRequest, deadline: Deadline) -> None:
        self.serving, self.body = serving, body
        params = body.sampling_params(serving.engine.sampling_defaults)
        search = requested_search(body.search, body)
        self.conversation = Conversation(serving, body.conversation(), params, body.tool_use(), deadline, search)
        self.conversation.describe("messages", body.tools, bool(body.stream))

    async def whole(self) -> Raw:
        """Return the answer in one piece."""
        await self._start()
        blocks = await self.conversation.whole()
        ending = self._ending()
        message = {**self._message(), "content": [_block(block) for block in blocks], **ending}
        message["usage"] = self._usage()
        if self.conversation.report is not None:
            message["search"] = self.conversation.report
        return Raw(message)

    async def begin(self) -> AsyncIterator[bytes]:
        """Submit the request, and return the stream of events."""
        await self._start()
        return self._events()

    async def _start(self) -> None:
        await self.conversation.start(self.body.template_kwargs(), goes_on=self.body.begins_the_answer)

    async def _events(self) -> AsyncIterator[bytes]:
        begun = False
        async for news in self.conversation.news():
            if not begun:
                begun = True
                yield named_event("message_start", {"type": "message_start", "message": self._message()})
            if self.conversation.progress is not None:  # clients skip pings
                yield named_event("ping", {"type": "ping", "search": self.conversation.progress})
            if self.conversation.continued:
                yield CONTINUED
            yield b"".join(_event(each) for each in news)
        delta = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        yield named_event("message_delta", delta) + named_event("message_stop", {"type": "message_stop"})

    def _message(self) -> dict[str, Any]:
        generation = self.conversation.generation
        return {
            "id": f"msg_{generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self.serving.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _ending(self) -> dict[str, Any]:
        ending = self.conversation.ending
        stopped = ending.stop_reason if isinstance(ending.stop_reason, str) else None
        called = any(block.kind == "call" for block in self.conversation.blocks.blocks)
        reason = "max_tokens" if ending.reason == "length" else "tool_use" if called else "end_turn"
        return {"stop_reason": "stop_sequence" if stopped is not None else reason, "stop_sequence": stopped}

    def _usage(self) -> dict[str, Any]:
        usage = self.conversation.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
            **({} if usage.continued is None else {"continued": usage.continued}),
        }


def _block(block: Block) -> dict[str, Any]:
    """Return a complete block as plain data, without arguments that were cut off, which are not valid JSON."""
    if block.kind == "text":
        return {"type": "text", "text": block.content}
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": block.content, "signature": ""}
    try:
        value = json.loads(block.content)
    except ValueError:
        value = {}
    return {"type": "tool_use", "id": f"{ID_PREFIX}{block.id}", "name": block.name, "input": value}


def _event(news: News) -> bytes:
    block = news.block
    if news.what == "begin":
        empty = _block(Block(block.kind, block.index, "", block.id, block.name))
        event: dict[str, Any] = {"type": "content_block_start", "index": block.index, "content_block": empty}
    elif news.what == "more":
        kind, field = _DELTAS[block.kind]
        event = {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: news.text}}
    else:
        event = {"type": "content_block_stop", "index": block.index}
    return named_event(event["type"], event)
