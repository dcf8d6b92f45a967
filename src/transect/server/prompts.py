"""From a request body to token ids. Long texts are encoded in a thread, so that they do not hold up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..text.tools.generic import taught
from ..text.tools.spec import ToolUse
from .errors import ApiError
from .generation import Prompt
from .protocol import ChatMessage
from .serving import Serving

LONG = 4096
"""Characters from which encoding is worth a thread."""


async def encode(serving: Serving, text: str, *, add_special: bool, parse_special: bool = False) -> list[int]:
    """Token ids of a text.

    Raises:
        ApiError: 400 where the model has no tokenizer.
    """
    encode = serving.engine.tokenizer.encode
    try:
        if len(text) < LONG:
            return encode(text, add_special_tokens=add_special, parse_special=parse_special)
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special, parse_special=parse_special)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt", code="cannot_encode") from None


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
    use: ToolUse | None = None,
) -> Prompt:
    """A conversation through the model's chat template; ``use``: the tools that it may use.

    Raises:
        ApiError: 400 where the model has no template, the template refuses the messages, or the result is too long.
    """
    template = serving.engine.chat_template
    if template is None:
        message = "this model brings no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    plain = [message.plain() for message in messages]
    extra = dict(template_kwargs or {})
    if serving.shape.taught:
        if use is not None or any(message.role == "tool" or message.tool_calls for message in messages):
            plain = taught(plain, use)
    elif use is not None:
        extra["tools"] = [tool.as_openai() for tool in use.tools]
    reserved = sorted({"messages", "add_generation_prompt"} & extra.keys())
    if reserved:
        raise ApiError(400, f"chat_template_kwargs must not hold {reserved[0]!r}", param="chat_template_kwargs")
    try:
        text = await asyncio.to_thread(template.render, plain, add_generation_prompt, **extra)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_error") from None
    token_ids = await encode(serving, text, add_special=False, parse_special=True)
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
        message = (
            f"{field} has {len(token_ids)} tokens, but prompt and answer together have {limit} tokens of context: "
            f"shorten it to at most {limit - 1}"
        )
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    highest = max(token_ids)
    if highest >= serving.engine.vocab_size:
        message = f"{field} holds token id {highest}; this model has ids 0 to {serving.engine.vocab_size - 1}"
        raise ApiError(400, message, param=field, code="invalid_token_id")
