"""Define requests to ``/v1/messages`` (Anthropic's API), and translate them into chats of the chat API."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from ...engine.scheduling.sampling_params import SamplingParams
from ...text.reasoning import SWITCHES
from ...text.sampling_defaults import SamplingDefaults
from ...text.tools.spec import ToolUse, tool_use
from ..http.errors import ApiError, bad_value
from ..openai.protocol import FIELDS, Body, ChatMessage, SenderBody, Whole
from ..structured import response_format

ID_PREFIX = "toolu_"
"""Ids of calls begin so in this API."""


class Turn(Body):
    """One message: text, or blocks of text, calls, results of calls, and thoughts."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountRequest(SenderBody):
    """``POST /v1/messages/count_tokens``: how long a prompt is."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def conversation(self) -> list[ChatMessage]:
        """Return the messages in the chat API's form.

        Raises:
            ApiError: 400 for a block that this server cannot read.
        """
        found: list[ChatMessage] = []
        if self.system:
            blocks = self.system if isinstance(self.system, list) else [{"type": "text", "text": self.system}]
            found.append(ChatMessage(role="system", content=_text(blocks, "system")))
        for number, turn in enumerate(self.messages):
            found += _messages(turn, f"messages[{number}]")
        return found

    @property
    def begins_the_answer(self) -> bool:
        """True if the last turn is the assistant's and holds text alone, so that the answer continues it."""
        last = self.messages[-1]
        texts = isinstance(last.content, str) or all(block.get("type") == "text" for block in last.content)
        return last.role == "assistant" and texts

    def tool_use(self) -> ToolUse | None:
        """Return the tools that may be called.

        Raises:
            ApiError: 400.
        """
        choice = self.tool_choice or {"type": "auto"}
        modes = {"auto": "auto", "any": "required", "none": "none", "tool": {"name": choice.get("name")}}
        kind = choice.get("type")
        if not isinstance(kind, str) or kind not in modes:
            raise ApiError(400, "tool_choice type must be auto, any, tool or none", param="tool_choice")
        tools = [
            {
                **{name: tool.get(name) for name in ("name", "description", "strict")},
                "parameters": tool.get("input_schema"),
            }
            if tool.get("type", "custom") == "custom"
            else {"type": tool["type"]}
            for tool in self.tools or ()
        ]
        parallel = choice.get("disable_parallel_tool_use") is not True
        try:
            mode = modes[kind]
            return tool_use(tools, mode if tools or mode != "none" else None, parallel)
        except ValueError as error:
            raise bad_value(str(error), FIELDS) from None

    def template_kwargs(self) -> dict[str, Any] | None:
        """Return ``thinking`` as the template variables of models that think; None if the field does not set it."""
        kind = (self.thinking or {}).get("type")
        return None if kind not in ("enabled", "disabled") else dict.fromkeys(SWITCHES, kind == "enabled")


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    max_tokens: Whole
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    search: dict[str, Any] | None = None

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Build the sampling parameters from the given fields; the others come from the model's ``defaults``.

        Raises:
            ApiError: 400, a value is out of range.
        """
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        form = self.output_format or (self.output_config or {}).get("format")
        try:
            return SamplingParams(
                **{**defaults.values, **{name: value for name, value in given.items() if value is not None}},
                max_tokens=defaults.limit(self.max_tokens),
                stop=self.stop_sequences,
                structured_outputs=None if form is None else response_format(form),
            )
        except ValueError as error:
            raise bad_value(str(error), {*FIELDS, *type(self).model_fields}) from None


def _text(blocks: Any, where: str) -> str:
    """Return the text of blocks that hold nothing but text.

    Raises:
        ApiError: 400.
    """
    texts = []
    for block in blocks if isinstance(blocks, list) else [blocks]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = str(block.get("type") if isinstance(block, dict) else type(block).__name__)[:40]
            raise ApiError(
                400, f"{where} holds a block of type {kind!r}; text is all this model can read", param="messages"
            )
        texts.append(block["text"])
    return "\n".join(texts)


def _messages(turn: Turn, where: str) -> list[ChatMessage]:
    """Convert a turn to one message or several: each tool result is a message of its own."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    found: list[ChatMessage] = []
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts = ""
    for block in turn.content:
        kind = block.get("type")
        if kind == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else _text(content, where)
            found.append(ChatMessage(role="tool", tool_call_id=_id(block.get("tool_use_id")), content=text))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(
                {"id": _id(block.get("id")), "function": {"name": str(block.get("name")), "arguments": arguments}}
            )
        elif kind == "thinking":
            thoughts += str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            texts.append(block)
    if texts or calls or thoughts or not found:
        message = {"role": turn.role, "content": _text(texts, where) if texts or not calls else None}
        more = {"tool_calls": calls or None, "reasoning_content": thoughts or None}
        found.append(ChatMessage.model_validate({**message, **more}))
    return found


def _id(value: Any) -> str:
    """Return the id of a call without the prefix that answers add to ids: some templates inspect ids."""
    return str(value).removeprefix(ID_PREFIX)
