"""Define request bodies as pydantic models: OpenAI's fields and vLLM's extra sampling fields.

Types are checked here and ranges in ``SamplingParams``, so that each has one source of truth. A field that is neither
known nor known to be harmless is an error that names the nearest field: a misspelt ``temprature`` must not be ignored.
Whole numbers are bounded so that they fit the engine's messages.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...engine.scheduling.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from ...text.sampling_defaults import SamplingDefaults
from ..http.bounds import MAX_TEMPLATE_ARGUMENTS, AnyPrompt, FewParts, Listed, at_most
from ..http.errors import nearest
from ..structured import structured_outputs
from . import unsupported

# Fields of OpenAI's API that change nothing about the tokens a local server returns.
HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    )
)
# Fields that would change the answer, but that this server does not have: name -> values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "tool_calls": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "annotations": (None, []),
}


def _whole(value: Any) -> Any:
    """Convert whole floats such as 4.0, which some clients send, to integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), le=2**64 - 1)]


def shape(sentence: str) -> WrapValidator:
    """Replace the many errors of a union type by one: ``<field> must be <sentence>``."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("shape", "must be {sentence}", {"sentence": sentence}) from None

    return WrapValidator(check)


Prompt = Annotated[
    str | list[str] | list[TokenId] | list[list[TokenId]],
    AnyPrompt,
]
Stop = Annotated[str | Listed[str], shape("a string or a list of strings")]


class Body(BaseModel):
    """A JSON object that refuses unknown fields, naming the nearest known one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept, known = {}, cls.model_fields  # once: the look-up is Python too, and a chat may have 5,000 messages
        for name, value in data.items():
            if name in known:
                kept[name] = value
            elif value is None or name in HARMLESS or name in unsupported.IGNORED:
                continue
            elif name in NOT_SUPPORTED or name in unsupported.EMPTY:
                nothings = NOT_SUPPORTED.get(name) or unsupported.EMPTY[name]
                if not unsupported.asks_for_nothing(value, nothings):
                    context = {"name": name, "sentence": unsupported.sentence(name)}
                    raise PydanticCustomError("unsupported_field", "{sentence}", context)
            else:
                shown = name if len(name) <= 60 else name[:57] + "..."
                context = {"name": shown, "hint": nearest(name[:60], known)}
                raise PydanticCustomError("unknown_field", "unknown field '{name}'{hint}", context)
        return kept


class TextPart(Body):
    """One part of a message's content; this server's models read text."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A part of an earlier answer in which the model refused; the model reads it as its own text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Text of the refusal."""
        return self.refusal


Content = Annotated[
    str | Listed[TextPart | RefusalPart],
    shape('a string or a list of {"type": "text", "text": ...} parts (text is all it can read)'),
]


class CalledFunction(Body):
    """A function, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class MessageCall(Body):
    """A call that the assistant has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class ChatMessage(Body):
    """One message of a conversation; ``developer`` is read as ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _refusals_are_answers(self) -> ChatMessage:
        """Read a refusal in an earlier answer as that message's text."""
        if self.role == "assistant":
            if self.refusal and not self.content:
                self.content = self.refusal
            if isinstance(self.content, list) and any(part.type == "refusal" for part in self.content):
                self.content = [TextPart(type="text", text=part.text) for part in self.content]
        elif self.refusal or (isinstance(self.content, list) and any(p.type == "refusal" for p in self.content)):
            context = {"sentence": "refusal belongs to messages of the assistant", "name": "refusal"}
            raise PydanticCustomError("unsupported_field", "{sentence}", context)
        self.refusal = None
        return self

    @property
    def text(self) -> str:
        """Content as text."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())

    def plain(self) -> dict[str, Any]:
        """Convert the message to the form that chat templates take; thoughts get the name that templates expect."""
        role = "system" if self.role == "developer" else self.role
        fields = {**self.model_dump(exclude_none=True), "role": role}
        fields.setdefault("content", None)
        thoughts = fields.pop("reasoning", None)
        return {"reasoning_content": thoughts, **fields} if thoughts is not None else fields


Messages = Annotated[Listed[ChatMessage], Field(min_length=1), FewParts]


class StreamOptions(Body):
    """``include_usage`` adds a last chunk with token counts; ``continuous_usage_stats`` puts those so far into each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


PASSED_ON = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if "log" not in field.name
    and field.name not in ("structured_outputs", "bad_words_token_ids", "truncate_prompt_tokens")
)
"""Fields passed to ``SamplingParams`` under the same name. logit_bias, logprobs and structured outputs differ in form,
and prompts are truncated earlier."""


class SenderBody(Body):
    """Fields about the sender, which change no answer (``server/sender.py``). Values of other types are ignored."""

    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    prompt_cache_key: Any = None


class SamplingBody(SenderBody):
    """The fields that completions and chat share."""

    model: str | None = None
    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_LOGIT_BIASES)] = None
    seed: Seed | None = None
    stop: Stop | None = None
    max_tokens: Whole | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's extras
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Listed[TokenId] | None = None
    allowed_token_ids: Listed[TokenId] | None = None
    bad_words: Listed[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Whole | None = None
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            text = "stream_options needs stream=true"
            raise PydanticCustomError("unsupported_field", text, {"name": "stream_options"})
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_need_one_piece(self) -> SamplingBody:
        if self.prompt_logprobs is not None and self.stream:
            text = "prompt_logprobs needs stream=false"
            raise PydanticCustomError("unsupported_field", text, {"name": "prompt_logprobs"})
        return self

    @model_validator(mode="after")
    def _length_penalty_needs_beams(self) -> SamplingBody:
        if self.length_penalty not in (None, 1) and not self.use_beam_search:
            text = "length_penalty is for beam search: set use_beam_search, or leave it out"
            raise PydanticCustomError("unsupported_field", text, {"name": "length_penalty"})
        return self

    @property
    def include_usage(self) -> bool:
        """True if the stream's last chunk must carry the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream must carry the token counts so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling_params(self, defaults: SamplingDefaults, **more: Any) -> SamplingParams:
        """Build ``SamplingParams`` from the given fields; the others come from the model's ``defaults``. ``more``
        overrides both.

        Raises:
            ValueError: a value is out of range; the message begins with the field's name.
        """
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        form = {} if "structured_outputs" in more else {"structured_outputs": structured_outputs(self)}
        return SamplingParams(**{**defaults.values, **given, **form, "logit_bias": self._bias(), **more})

    def _bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        bias = {}
        for key, value in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"logit_bias keys must be token ids such as '42', got {key[:60]!r}")
            bias[int(key)] = float(value)
        return bias


def opens_a_turn(add: bool | None, continues: bool | None) -> bool:
    """Return True if a rendered chat ends by opening the assistant's turn, and False if it continues the last message.

    Raises:
        ValueError: both are requested.
    """
    if add and continues:
        raise ValueError("continue_final_message continues the last message: leave add_generation_prompt out")
    return add is not False and not continues


class CompletionRequest(SamplingBody):
    """``POST /v1/completions``: continue one prompt or several. 16 tokens unless ``max_tokens`` is set."""

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Whole | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    best_of: Whole | None = None


class ChatCompletionRequest(SamplingBody):
    """``POST /v1/chat/completions``: the next message of a conversation, by the model's own chat template."""

    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_TEMPLATE_ARGUMENTS)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    search: dict[str, Any] | None = None
    continue_token_ids: Listed[TokenId] | None = None
    continue_choice: Whole | None = None


class TokenizeRequest(Body):
    """``POST /tokenize``: ``prompt`` as text, or ``messages`` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``: text of token ids."""

    model: str | None = None
    tokens: Listed[TokenId]
    skip_special_tokens: bool | None = None


FIELDS = frozenset().union(
    *(model.model_fields for model in (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest))
)
