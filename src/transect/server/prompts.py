"""From a request body to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from .encoding import TooManyTokens
from .errors import ApiError
from .generation import Prompt
from .protocol import ChatMessage
from .serving import Serving

COUNTED_CONTEXTS = 4
LEAST_COUNTED = 65536


def most_counted(serving: Serving) -> int:
    """Tokens of a text that is only to be tokenized: enough to see by how much a text is too long."""
    return max(COUNTED_CONTEXTS * serving.engine.max_model_len, LEAST_COUNTED)


async def encode(
    serving: Serving,
    text: str,
    *,
    add_special: bool,
    parse_special: bool = False,
    limit: int | None = None,
    field: str = "prompt",
) -> list[int]:
    """Token ids of a text.

    Args:
        limit: a text with more tokens is given up as soon as that is known; None: the context length.
        field: where the text comes from, for errors.

    Raises:
        ApiError: 400 where it is too long, or the model has no tokenizer.
    """
    most = serving.engine.max_model_len if limit is None else limit
    try:
        return await serving.encoder.encode(
            serving.engine.tokenizer, text, most, add_special=add_special, parse_special=parse_special
        )
    except TooManyTokens as error:
        if limit is None:
            raise too_long(serving, error.at_least, field, least=True) from None
        message = f"the text has at least {error.at_least} tokens; this route counts up to {limit}"
        raise ApiError(400, message, param=field, code="context_length_exceeded") from None
    except ValueError as error:
        raise ApiError(400, str(error), param=field, code="cannot_encode") from None


async def completion_prompts(serving: Serving, prompt: Any) -> list[Prompt]:
    """The prompts of a completions request, each as text or token ids.

    Raises:
        ApiError: 400 where one is empty or too long, or there are too many.
    """
    many: list[Any] = (
        list(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    )
    limit = serving.options.max_prompts
    if len(many) > limit:
        raise ApiError(400, f"prompt holds {len(many)} prompts; send at most {limit} in one request", param="prompt")
    prompts = []
    for each in many:
        if isinstance(each, str):
            prompts.append(Prompt(each, await encode(serving, each, add_special=True) if each else []))
            await asyncio.sleep(0)  # many short ones are as much work as a long one
        else:
            prompts.append(Prompt(None, each))
    for each in prompts:
        check_length(serving, each.token_ids, "prompt")
    return prompts


async def chat_prompt(
    serving: Serving,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    template_kwargs: dict[str, Any] | None = None,
) -> Prompt:
    """A conversation through the model's chat template.

    Raises:
        ApiError: 400 where the model has no template, the template refuses the messages, or the result is too long.
    """
    template = serving.engine.chat_template
    if template is None:
        message = "this model brings no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    plain = [message.plain() for message in messages]
    extra = template_kwargs or {}
    reserved = sorted({"self", "messages", "add_generation_prompt"} & extra.keys())
    if reserved:
        raise ApiError(400, f"chat_template_kwargs must not hold {reserved[0]!r}", param="chat_template_kwargs")
    try:
        text = await serving.renderer.render(template, plain, add_generation_prompt, extra)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_error") from None
    token_ids = await encode(serving, text, add_special=False, parse_special=True, field="messages")
    check_length(serving, token_ids, "messages")
    return Prompt(text, token_ids)


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
    """The error for a prompt of so many tokens; ``least``: of so many or more."""
    limit = serving.engine.max_model_len
    message = (
        f"{field} has {'at least ' * least}{tokens} tokens, but prompt and answer together have {limit} tokens of "
        f"context: shorten it to at most {limit - 1}"
    )
    return ApiError(400, message, param=field, code="context_length_exceeded")
