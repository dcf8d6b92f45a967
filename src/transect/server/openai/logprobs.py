"""OpenAI's two formats of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...text.protocols import TokenizerLike
from .replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TokenLogprobWithId,
    TopLogprob,
    TopLogprobWithId,
)

if TYPE_CHECKING:
    from ...text.outputs import PositionLogprobs

# JSON has no -inf; a token that cannot be drawn gets the number that vLLM and OpenAI's older API use.
NEVER = -9999.0


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[PromptLogprobs | None] | None:
    """Write a prompt's log-probabilities in vLLM's format: for each token but the first, its own and the likeliest, by
    token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): PromptLogprob(
                logprob=max(entry.logprob, NEVER), rank=entry.rank, decoded_token=entry.decoded_token
            )
            for token, entry in position.items()
        }
        for position in positions
    ]


def chat_logprobs(
    positions: Sequence[PositionLogprobs],
    token_ids: Sequence[int],
    top: int,
    tokenizer: TokenizerLike,
    with_ids: bool = False,
) -> ChatLogprobs:
    """Write log-probabilities in the chat format: each token with its bytes and its ``top`` likeliest alternatives,
    likeliest first. ``with_ids``: with the ids of all of them."""
    one: Any = TokenLogprobWithId if with_ids else TokenLogprob
    other: Any = TopLogprobWithId if with_ids else TopLogprob
    return ChatLogprobs(
        content=[
            one(
                **_named(token, position, tokenizer, with_ids),
                top_logprobs=[
                    other(**_named(each, position, tokenizer, with_ids)) for each in _likeliest(position, top)
                ],
            )
            for token, position in zip(token_ids, positions, strict=True)
        ]
    )


def _named(token: int, position: PositionLogprobs, tokenizer: TokenizerLike, with_id: bool) -> dict:
    entry = position[token]
    text = entry.decoded_token if entry.decoded_token is not None else tokenizer.token_text(token)
    named = {"token": text, "logprob": max(entry.logprob, NEVER), "bytes": list(tokenizer.token_bytes(token))}
    return named | {"token_id": token} if with_id else named


def _likeliest(position: PositionLogprobs, top: int) -> list[int]:
    ranked = sorted(position, key=lambda token: -position[token].logprob)
    return ranked[:top]


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    token_ids: Sequence[int],
    top: int,
    tokenizer: TokenizerLike,
    offset: int = 0,
) -> CompletionLogprobs:
    """Write log-probabilities in the older format, as parallel lists. ``offset``: characters of the answer before the
    first of these tokens.

    A position of None is the first token of an echoed prompt, which nothing predicts.
    """
    result = CompletionLogprobs(text_offset=[], tokens=[], token_logprobs=[], top_logprobs=[] if top else None)
    for token, position in zip(token_ids, positions, strict=True):
        text = tokenizer.token_text(token)
        result.text_offset.append(offset)
        offset += len(text)
        result.tokens.append(text)
        result.token_logprobs.append(None if position is None else max(position[token].logprob, NEVER))
        if result.top_logprobs is not None:
            result.top_logprobs.append(
                None
                if position is None
                else {
                    position[other].decoded_token or tokenizer.token_text(other): max(position[other].logprob, NEVER)
                    for other in _likeliest(position, top)
                }
            )
    return result
