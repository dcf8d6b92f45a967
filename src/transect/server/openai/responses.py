"""``POST /v1/responses``: OpenAI's newer API. Conversations are remembered for a while, so that
``previous_response_id`` works; they live in this process alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...text.reasoning import effort_variables
from ..blocks import Block, Conversation, News
from ..generation import Prompt
from ..http.clients import current_client
from ..http.errors import ApiError
from ..http.lifetime import Deadline
from ..http.sse import CONTINUED, Raw, named_event
from ..searches import requested_search
from ..sender import current_request
from ..serving import Serving
from .protocol import ChatMessage
from .responses_protocol import ResponsesRequest, as_message

MOST_KEPT = 512
MOST_BYTES = 32 * 1024 * 1024
"""Most bytes of all kept answers and conversations together, as JSON."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer as JSON, the conversation up to and including it, their bytes, the client's name, and the beginning of
    the conversation as of its first request."""

    answer: bytes
    messages: list[ChatMessage]
    size: int
    owner: str
    beginning: str


class ResponseStore:
    """Answers and the conversations that led to them; the oldest are dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    def keep(self, response: dict[str, Any], messages: list[ChatMessage]) -> None:
        """Keep an answer, with the whole conversation up to and including it."""
        answer = msgspec.json.encode(response)
        size = len(answer) + sum(len(message.model_dump_json()) for message in messages)
        beginning = current_request().sender.beginning
        self._kept[response["id"]] = _Kept(answer, messages, size, current_client().name, beginning)
        self._bytes += size
        while len(self._kept) > MOST_KEPT or self._bytes > MOST_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def find(self, response_id: str) -> tuple[bytes, list[ChatMessage]]:
        """Return an answer as JSON, and the conversation up to and including it.

        Raises:
            ApiError: 404 where it is not remembered, or is another client's.
        """
        found, client = self._kept.get(response_id), current_client()
        if found is None or not (client.operator or found.owner == client.name):
            message = f"the response {response_id[:80]!r} is not kept by this server: send the conversation as input"
            raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found.answer, found.messages

    def beginning(self, response_id: str) -> str:
        """Return the beginning of the conversation that led to an answer; empty if it is not remembered."""
        found = self._kept.get(response_id)
        return "" if found is None else found.beginning

    def forget(self, response_id: str) -> None:
        """Delete an answer. Raises ApiError as ``find`` does."""
        self.find(response_id)
        self._bytes -= self._kept.pop(response_id).size


class Responses:
    """One request."""

    def __init__(self, serving: Serving, store: ResponseStore, body: ResponsesRequest, deadline: Deadline) -> None:
        body.check()
        self.serving, self.body, self.store = serving, body, store
        before = [] if body.previous_response_id is None else store.find(body.previous_response_id)[1]
        self._kept = [*before, *body.new_messages()]
        system = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
        params = body.sampling_params(serving.engine.sampling_defaults)
        search = requested_search(body.search, body)
        self.conversation = Conversation(serving, [*system, *self._kept], params, body.tool_use(), deadline, search)
        self.conversation.describe("responses", body.tools, bool(body.stream))
        self._number = -1

    async def whole(self) -> Raw:
        """Return the answer in one piece."""
        await self._start()
        await self.conversation.whole()
        return Raw(self._end())

    async def begin(self) -> AsyncIterator[bytes]:
        """Submit the request, and return the stream of events."""
        await self._start()
        return self._events()

    async def _start(self) -> None:
        template, effort = self.serving.engine.chat_template, self.body.effort
        variables = None
        if template is not None and effort is not None:
            variables = effort_variables(effort, template.variables)
        variables = {**(variables or {}), **(self.body.chat_template_kwargs or {})}
        try:
            await self.conversation.start(variables)
        except ApiError as error:
            if error.code != "context_length_exceeded" or self.body.truncation != "auto":
                raise
            await self._start_shortened(variables, error)

    async def _start_shortened(self, variables: dict[str, Any], error: ApiError) -> None:
        """Start with as many of the newest turns as the context holds. System messages are kept.

        Args:
            error: raised if not even the newest turn fits.
        """
        messages = self.conversation.messages
        turns = [number for number, message in enumerate(messages) if message.role == "user"]
        kept: tuple[list[ChatMessage], Prompt] | None = None
        low, high = 1, len(turns) - 1  # the turn to begin with lies in low ... high
        while low <= high:
            middle = (low + high) // 2
            begin = turns[middle]
            system = [message for message in messages[:begin] if message.role in ("system", "developer")]
            self.conversation.messages = [*system, *messages[begin:]]
            try:
                await self.conversation.prepare(variables)
            except ApiError as refusal:
                if refusal.code != "context_length_exceeded":
                    raise
                low = middle + 1
                continue
            high = middle - 1
            kept = self.conversation.messages, self.conversation.prompt
        if kept is None:
            raise error
        self.conversation.messages, self.conversation.prompt = kept
        await self.conversation.submit()

    async def _events(self) -> AsyncIterator[bytes]:
        begun = False
        async for news in self.conversation.news():
            if not begun:
                begun = True
                response = self._response("in_progress", [])
                yield self._event("response.created", response=response)
                yield self._event("response.in_progress", response=response)
            if self.conversation.progress is not None:
                yield self._event("response.search.progress", search=self.conversation.progress)
            if self.conversation.continued:
                yield CONTINUED
            yield b"".join(self._news(each) for each in news)
        response = self._end()
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number, **fields})

    def _news(self, news: News) -> bytes:
        """Write the events of one change; a message and thoughts have one part each."""
        block = news.block
        item = self._item(block, "completed" if news.what == "end" else "in_progress")
        place = {"item_id": item["id"], "output_index": block.index}
        part = {**place, "content_index": 0}
        name = {"text": "output_text", "thoughts": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        if news.what == "begin":
            empty = {**item, "content": []} if "content" in item else item
            first = self._event("response.output_item.added", output_index=block.index, item=empty)
            if block.kind == "call":
                return first
            return first + self._event("response.content_part.added", **part, part=_part(block.kind, ""))
        if block.kind == "call":
            if news.what == "more":
                return self._event(f"response.{name}.delta", **place, delta=news.text)
            done = self._event(f"response.{name}.done", **place, name=block.name, arguments=block.content)
        else:
            more: dict[str, Any] = {"logprobs": news.logprobs} if block.kind == "text" else {}
            if news.what == "more":
                return self._event(f"response.{name}.delta", **part, delta=news.text, **more)
            more = {"logprobs": block.logprobs} if block.kind == "text" else {}
            done = self._event(f"response.{name}.done", **part, text=block.content, **more)
            part_done = _part(block.kind, block.content, block.logprobs)
            done += self._event("response.content_part.done", **part, part=part_done)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        unique = f"{self.conversation.generation.id}_{block.index}"
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.content}
            return {"type": "function_call", "id": f"fc_{unique}", "status": status, **call}
        content = [_part(block.kind, block.content, block.logprobs)]
        if block.kind == "thoughts":
            return {"type": "reasoning", "id": f"rs_{unique}", "status": status, "summary": [], "content": content}
        return {"type": "message", "id": f"msg_{unique}", "status": status, "role": "assistant", "content": content}

    def _end(self) -> dict[str, Any]:
        blocks = self.conversation.blocks.blocks
        status = "incomplete" if self.conversation.ending.reason == "length" else "completed"
        response = self._response(status, [self._item(block, status) for block in blocks])
        usage = self.conversation.generation.usage()
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.conversation.thought_tokens},
            "total_tokens": usage.total_tokens,
        }
        if self.conversation.report is not None:
            response["search"] = self.conversation.report
        if usage.continued is not None:
            response["usage"]["continued"] = usage.continued
        if self.body.store is not False:
            self.store.keep(response, [*self._kept, as_message(blocks)])
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, generation = self.body, self.conversation.generation
        return {
            "id": f"resp_{generation.id}",
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.serving.model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": body.store is not False,
            "temperature": self.conversation.params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self.conversation.params.top_p,
            "top_logprobs": body.logprobs or 0,
            "max_tool_calls": None,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    if kind == "thoughts":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def error_event(error: ApiError) -> bytes:
    """Write an error in the middle of a stream as an event."""
    detail = error.body["error"]
    return named_event("error", {"type": "error", "sequence_number": 0, **detail, "error": detail})
