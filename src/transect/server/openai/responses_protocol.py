"""Define requests to ``/v1/responses``, and translate them into chats of the chat API."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from ...engine.scheduling.sampling_params import SamplingParams
from ...text.sampling_defaults import SamplingDefaults
from ...text.tools.spec import ToolUse, tool_use
from ..http.errors import ApiError, bad_value
from ..structured import response_format
from .protocol import FIELDS, ChatMessage, SenderBody, Whole

_ROLES = ("system", "developer", "user", "assistant")


class ResponsesRequest(SenderBody):
    """``POST /v1/responses``."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    background: bool | None = None
    stream_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Whole | None = None
    max_tool_calls: Whole | None = None
    search: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ApiError, 400, for unsupported settings."""
        if self.background:
            raise ApiError(400, "background is not supported by this server: leave it out", param="background")
        if self.truncation not in (None, "disabled", "auto"):
            raise ApiError(400, "truncation must be auto or disabled", param="truncation")
        if self.max_tool_calls is not None:
            message = (
                "max_tool_calls bounds calls of built-in tools, which this server does not have: leave it out; "
                "parallel_tool_calls: false bounds the calls of functions in an answer to one"
            )
            raise ApiError(400, message, param="max_tool_calls")
        unknown = sorted(set(self.reasoning or ()) - {"effort", "summary", "generate_summary"})
        if unknown:
            message = f"reasoning has no field {unknown[0][:40]!r}; it has effort and summary"
            raise ApiError(400, message, param="reasoning")

    @property
    def logprobs(self) -> int | None:
        """Likeliest tokens to show beside each token of the text; None for no log-probabilities."""
        asked = "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs if self.top_logprobs is not None else 0 if asked else None

    @property
    def effort(self) -> str | None:
        """Requested effort of thinking; None if unset."""
        effort = (self.reasoning or {}).get("effort")
        return effort if isinstance(effort, str) else None

    def new_messages(self) -> list[ChatMessage]:
        """Convert ``input`` to messages of the chat API.

        Raises:
            ApiError: 400 for an item that this server cannot read.
        """
        if isinstance(self.input, str):
            return [ChatMessage(role="user", content=self.input)]
        found: list[ChatMessage] = []
        thoughts = ""
        for number, item in enumerate(self.input):
            if item.get("type") == "reasoning":
                thoughts += _thoughts(item)
                continue
            try:
                message = _message(item, f"input[{number}]")
            except ValidationError:
                raise ApiError(400, f"input[{number}] is not an item of a conversation", param="input") from None
            if thoughts and message.role == "assistant":
                message.reasoning_content = thoughts
            thoughts = ""
            last = found[-1] if found else None
            if message.tool_calls and last is not None and last.role == "assistant":
                last.tool_calls = [*(last.tool_calls or ()), *message.tool_calls]
                last.reasoning_content = last.reasoning_content or message.reasoning_content
            else:
                found.append(message)
        return found

    def tool_use(self) -> ToolUse | None:
        """Return the tools that may be called. Raises ApiError, 400, if tools are malformed."""
        try:
            return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        except ValueError as error:
            raise bad_value(str(error), FIELDS) from None

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Build the sampling parameters from the given fields; the others come from the model's ``defaults``.

        Raises:
            ApiError: 400, a value is out of range.
        """
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        form = (self.text or {}).get("format")
        try:
            return SamplingParams(
                **{**defaults.values, **{name: value for name, value in given.items() if value is not None}},
                max_tokens=defaults.limit(self.max_output_tokens),
                logprobs=self.logprobs,
                structured_outputs=None if form is None else response_format(form),
            )
        except ValueError as error:
            message = str(error).replace("max_tokens", "max_output_tokens").replace("response_format", "text format")
            message = f"top_{message}" if message.startswith("logprobs") else message
            raise bad_value(message, type(self).model_fields) from None


def _thoughts(item: dict[str, Any]) -> str:
    """Return the text of thoughts that a client sends back; other servers may have encrypted theirs."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _message(item: dict[str, Any], where: str) -> ChatMessage:
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") in _ROLES:
        return ChatMessage(role=item["role"], content=_text(item.get("content"), where))
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": {name: item.get(name) for name in ("name", "arguments")}}
        return ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    if kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else _text(output, where)
        return ChatMessage(role="tool", tool_call_id=str(item.get("call_id")), content=text)
    raise ApiError(400, f"{where} is of type {str(kind)[:40]!r}, which this server cannot read", param="input")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        name = "refusal" if kind == "refusal" else "text"
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(part.get(name), str):
            raise ApiError(400, f"{where} holds {str(kind)[:40]!r}; text is all this model can read", param="input")
        texts.append(part[name])
    return "\n".join(texts)


def as_message(blocks: list[Any]) -> ChatMessage:
    """Convert an answer to the next message of the conversation."""
    text = "".join(block.content for block in blocks if block.kind == "text")
    thoughts = "".join(block.content for block in blocks if block.kind == "thoughts")
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.content or json.dumps({})}}
        for block in blocks
        if block.kind == "call"
    ]
    message = {"role": "assistant", "content": text, "tool_calls": calls or None}
    return ChatMessage.model_validate({**message, "reasoning_content": thoughts or None})
