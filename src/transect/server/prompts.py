"""Conversion of request bodies to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..engine.frontends.inputs import room_for_prompt
from ..text.fill_in import Gap
from ..text.inert import ChatRendering
from ..text.protocols import TokenizerLike
from ..text.reasoning import effort_variables
from ..text.tools.registry import with_tools
from ..text.tools.spec import ToolUse
from .encoding import TooManyTokens
from .generation import Prompt
from .http.body import aside
from .http.errors import ApiError
from .openai import unsupported
from .openai.protocol import ChatMessage
from .serving import Serving

RESERVED = {"self", "messages", "add_generation_prompt"}
"""Names that ``chat_template_kwargs`` cannot set: they have a field of their own, or are reserved."""
COUNTED_CONTEXTS = 4
LEAST_COUNTED = 65536


def most_counted(serving: Serving) -> int:
    """Return the limit of tokens for texts that are only tokenized or truncated: enough to report by how much a text is
    too long."""
    return max(COUNTED_CONTEXTS * serving.engine.max_model_len, LEAST_COUNTED)


async def encode(
    serving: Serving,
    text: str,
    *,
    add_special: bool,
    parse_special: bool = False,
    limit: int | None = None,
    field: str = "prompt",
    tokenizer: TokenizerLike | None = None,
) -> list[int]:
    """Encode a text with the model's tokenizer, unless another is given.

    Args:
        limit: most tokens of the text; encoding stops above it. None for the context length.
        field: origin of the text, for errors.

    Raises:
        ApiError: 400 if the text is too long, or the model has no tokenizer.
    """
    most = serving.engine.max_model_len if limit is None else limit
    try:
        return await serving.encoder.encode(
            tokenizer or serving.engine.tokenizer, text, most, add_special=add_special, parse_special=parse_special
        )
    except TooManyTokens as error:
        if limit is None:
            raise too_long(serving, error.at_least, field, least=True) from None
        message = f"the text has at least {error.at_least} tokens; this route counts up to {limit}"
        raise ApiError(400, message, param=field, code="context_length_exceeded") from None
    except ValueError as error:
        raise ApiError(400, str(error), param=field, code="cannot_encode") from None


async def completion_prompts(
    serving: Serving,
    prompt: Any,
    *,
    add_special: bool = True,
    parse_special: bool = True,
    truncate: int | None = None,
    room: int = 1,
    field: str = "prompt",
    most: int | None = None,
) -> list[Prompt]:
    """Read the prompts of a completions request, each as text or token ids.

    ``add_special``: add the special tokens that the model expects around a text. ``parse_special``: read spellings of
    special tokens as those tokens. ``truncate``, ``room``: see ``truncated``. ``field``: origin of the prompts, for
    errors. ``most``: largest number of prompts; None for the server's option.

    Raises:
        ApiError: 400 if a prompt is empty or too long, or there are too many.
    """
    many: list[Any] = (
        list(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    )
    limit = serving.options.max_prompts if most is None else most
    if len(many) > limit:
        raise ApiError(400, f"{field} holds {len(many)} prompts; send at most {limit} in one request", param=field)
    prompts = []
    for each in many:
        if isinstance(each, str):
            counted = None if truncate is None else most_counted(serving)
            ids: list[int] = []
            if each:
                ids = await encode(
                    serving, each, add_special=add_special, parse_special=parse_special, limit=counted, field=field
                )
            prompts.append(Prompt(each, ids))
            if len(prompts) < len(many):
                await asyncio.sleep(0)  # many short ones are as much work as a long one
        else:
            prompts.append(Prompt(None, each))
    prompts = [truncated(serving, each, truncate, room) for each in prompts]
    for each in prompts:
        check_length(serving, each.token_ids, field)
    return prompts


async def gap_prompts(
    serving: Serving, prompt: Any, suffix: str, gap: Gap, *, parse_special: bool = True
) -> list[Prompt]:
    """Build the prompts of a completions request that fills the gap between ``prompt``, one text or several, and
    ``suffix``.

    Raises:
        ApiError: 400 where a prompt is not text, or too long, or there are too many.
    """
    many = [prompt] if isinstance(prompt, str) else list(prompt)
    limit = serving.options.max_prompts
    if len(many) > limit:
        raise ApiError(400, f"prompt holds {len(many)} prompts; send at most {limit} in one request", param="prompt")
    if not many or not all(isinstance(each, str) for each in many):
        raise ApiError(400, "with a suffix prompt must be a string or a list of strings", param="prompt")
    behind = await encode(serving, suffix, add_special=False, parse_special=parse_special, field="suffix")
    prompts = []
    for each in many:
        before = await encode(serving, each, add_special=False, parse_special=parse_special)
        prompts.append(Prompt(each, [*gap.prefix, *before, gap.suffix, *behind, gap.middle]))
        check_length(serving, prompts[-1].token_ids, "prompt")
        await asyncio.sleep(0)  # many short ones are as much work as a long one
    return prompts


def truncated(serving: Serving, prompt: Prompt, most: int | None, room: int) -> Prompt:
    """Keep the last ``most`` tokens of a prompt; -1 keeps as many as leave ``room`` for the answer in the context.

    Raises:
        ApiError: 400 where ``most`` is not a number of tokens, or the answer takes all of the context.
    """
    if most is None:
        return prompt
    if most < -1 or most == 0:
        message = f"truncate_prompt_tokens must be at least 1, or -1 for what the context holds, got {most}"
        raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
    if most == -1:
        try:
            most = room_for_prompt(room, serving.engine.max_model_len)
        except ValueError as error:
            raise ApiError(400, str(error), param="truncate_prompt_tokens", code="invalid_value") from None
    return prompt if len(prompt.token_ids) <= most else Prompt(None, prompt.token_ids[-most:])


async def chat_prompt(
    serving: Serving,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special: bool = False,
    truncate: int | None = None,
    room: int = 1,
    template_kwargs: dict[str, Any] | None = None,
    use: ToolUse | None = None,
) -> Prompt:
    """Render a conversation through the model's chat template; ``use``: the tools that it may use. Spellings of special
    tokens in a message stay text.

    Raises:
        ApiError: 400 where the model has no template, the template refuses the messages, or the result is too long.
    """
    template = serving.engine.chat_template
    if template is None:
        message = "this model brings no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    chat = await aside(_rendering, serving, messages, template_kwargs or {}, use, goes_on=continue_final_message)
    try:
        rendered = await serving.renderer.render(template, chat.messages, add_generation_prompt, chat.variables)
        text = await aside(chat.finish, rendered)
    except ValueError as error:
        raise ApiError(400, chat.shown(str(error)), param="messages", code="chat_template_error") from None
    token_ids = await encode(
        serving,
        text,
        add_special=add_special,
        parse_special=True,
        limit=None if truncate is None else most_counted(serving),
        field="messages",
        tokenizer=chat.encoder,
    )
    prompt = truncated(serving, Prompt(chat.shown(text), token_ids), truncate, room)
    check_length(serving, prompt.token_ids, "messages")
    return prompt


def _rendering(
    serving: Serving, messages: Sequence[ChatMessage], kwargs: dict[str, Any], use: ToolUse | None, *, goes_on: bool
) -> ChatRendering:
    """Prepare messages and variables for the template; arguments and errors as of ``chat_prompt``."""
    shape = serving.shape if use is not None else serving.shape_without_tools
    plain, variables = with_tools(shape, [message.plain() for message in messages], use)
    extra = {**kwargs, **variables}
    reserved = sorted(RESERVED & extra.keys())
    if reserved:
        raise ApiError(400, f"chat_template_kwargs must not hold {reserved[0]!r}", param="chat_template_kwargs")
    try:
        return ChatRendering(serving.engine.tokenizer, plain, extra, continue_final_message=goes_on)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_error") from None


def effort_kwargs(serving: Serving, effort: str | None) -> dict[str, Any]:
    """Return the template variables that set the effort of thinking.

    Raises:
        ApiError: 400 where the template knows no such thing, and thoughts are asked for.
    """
    if effort is None:
        return {}
    template = serving.engine.chat_template
    found = None if template is None else effort_variables(effort, template.variables)
    if found is None and effort != "none":
        message = unsupported.sentence("reasoning_effort").replace("this server", "this model's chat template")
        raise ApiError(400, message, param="reasoning_effort", code="unsupported_parameter")
    return found or {}


def check_length(serving: Serving, token_ids: Sequence[int], field: str) -> None:
    """Refuse a prompt that is empty or leaves no room for an answer.

    Raises:
        ApiError: 400, with the numbers.
    """
    limit = serving.engine.max_model_len
    if not token_ids:
        raise ApiError(400, f"{field} is empty: give at least one token", param=field, code="empty_prompt")
    if len(token_ids) >= limit:
        raise too_long(serving, len(token_ids), field)
    highest = max(token_ids)
    if highest >= serving.engine.vocab_size:
        message = f"{field} holds token id {highest}; this model has ids 0 to {serving.engine.vocab_size - 1}"
        raise ApiError(400, message, param=field, code="invalid_token_id")


def too_long(serving: Serving, tokens: int, field: str, *, least: bool = False) -> ApiError:
    """Return the error for a prompt of ``tokens`` tokens, or of at least as many with ``least``."""
    limit = serving.engine.max_model_len
    # These first words are OpenAI's, and are what clients look for to shorten a conversation and try again.
    message = (
        f"This model's maximum context length is {limit} tokens. However, your {field} resulted in "
        f"{'at least ' * least}{tokens} tokens, and the answer needs at least one: reduce the length of the {field} to "
        f"at most {limit - 1} tokens"
    )
    return ApiError(400, message, param=field, code="context_length_exceeded")
