"""Define OpenAI's response bodies as pydantic models. Absent optional fields are sent as null."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    """Number of prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Number of completion tokens that are thoughts."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts of a whole request, over all prompts and choices. ``completion_tokens_details`` is set if the model
    thinks before it answers. ``continued`` is set if an engine ended in the middle of an answer, and the engine that
    continued the answer cannot promise identical bits."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None
    continued: Literal["approximately"] | None = None

    @model_serializer(mode="wrap")
    def _without_details(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        for name in ("completion_tokens_details", "continued"):
            if getattr(self, name) is None:
                del fields[name]
        return fields


class TopLogprob(BaseModel):
    """A candidate token at a position. ``bytes`` is exact even if the token is part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token at a position, with the likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class TopLogprobWithId(TopLogprob):
    """A candidate token with its id, if token ids are requested."""

    token_id: int


class TokenLogprobWithId(TopLogprobWithId):
    """The chosen token at a position, with the likeliest alternatives and all their ids."""

    top_logprobs: list[TopLogprobWithId]


class PromptLogprob(BaseModel):
    """A candidate token at a position of the prompt; the likeliest has rank 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = dict[str, PromptLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[TokenLogprob] | list[TokenLogprobWithId]


class CompletionLogprobs(BaseModel):
    """One entry for each token; ``text_offset`` counts characters from the start of the answer's text."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(BaseModel):
    """``stop_reason`` is the stop string or stop token id that ended the choice, if any. ``token_ids`` (in a stream:
    new ones), ``prompt_token_ids`` and ``prompt_logprobs`` are present if requested."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PromptLogprobs | None] | None = None


class CompletionResponse(BaseModel):
    """A whole answer, and with ``finish_reason`` null also one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Brief(BaseModel):
    """An object in which null fields are left out."""

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class FunctionCall(Brief):
    """A function and its arguments as JSON text; in a stream, the new part of the text."""

    name: str | None = None
    arguments: str


class ToolCall(Brief):
    """A call that the model asks for; ``index`` only in a stream, ``id`` and ``type`` with a call's first piece."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The model's answer. Fields for calls and thoughts are left out if there are none. Thoughts have two names,
    because clients differ in the name that they read."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_missing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        missing = [name for name in ("reasoning_content", "reasoning", "tool_calls") if getattr(self, name) is None]
        return {name: value for name, value in handler(self).items() if name not in missing}


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[PromptLogprobs | None] | None = None
    prompt_token_ids: list[int] | None = None


class Delta(Brief):
    """New parts of a message; unchanged fields are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChunkChoice(BaseModel):
    """New parts of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a stream. The one with ``usage`` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class SearchedChat(ChatResponse):
    """The answer of a search, with its tree."""

    search: dict[str, Any]


class SearchChunk(ChatChunk):
    """Progress of a search, in a chunk that adds nothing to the answer; at the end its tree."""

    search: dict[str, Any]


class Model(BaseModel):
    """A name that requests may give as ``model``."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "transect"
    root: str
    """The model's name, or the directory of an adapter."""
    parent: str | None = None
    """The model that an adapter is beside; None for a model."""
    max_model_len: int


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(BaseModel):
    """Token ids of a text, and the longest context of a request. ``token_strs``: texts of the tokens, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Text of token ids."""

    prompt: str


class Version(BaseModel):
    """The version of this server."""

    version: str


class Load(BaseModel):
    """Requests in flight, under vLLM's name for them."""

    server_load: int


class TokenizerInfo(BaseModel):
    """Description of the tokenizer."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_ids: list[int]
    special_tokens: list[str]
    chat_template: str | None


class Health(BaseModel):
    """``state``: "ok"; or, with status 503, "hung", "dead" or "draining". ``engine_pids``: of the engines that live."""

    state: Literal["ok", "hung", "dead", "draining"]
    detail: str | None = None
    in_flight: int
    server_pid: int
    engine_pids: list[int]


def finish_reason(reason: str | None) -> FinishReason:
    """Return the engine's finish reason as OpenAI's; aborts and errors have become ``ApiError`` earlier."""
    assert reason in ("stop", "length", "tool_calls"), reason
    return reason  # type: ignore[return-value]
