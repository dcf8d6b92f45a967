"""Filling in the middle: a prompt of the texts before and after a gap, which the model continues with the missing text
(Bavarian et al. 2022). Models that learned this have three tokens for it, under different names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .protocols import TokenizerLike


class Form(NamedTuple):
    """Tokens before the prefix, before the suffix, and before the model's own text."""

    prefix: str
    suffix: str
    middle: str


FORMS = (
    Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|EOT|>")
"""Tokens with which such models end the filled-in text, or begin another file."""


class Gap(NamedTuple):
    """Tokens by which a model fills in a gap."""

    prefix: list[int]
    """Token ids before the prefix, including those that the model expects at the beginning of every prompt."""
    suffix: int
    middle: int
    ends: list[int]


def gap_of(tokenizer: TokenizerLike, *, add_special: bool) -> Gap | None:
    """Return the tokens by which a model fills in gaps; None if it has none.

    ``add_special``: include the BOS token, if the model expects one.
    """
    for form in FORMS:
        ids = [_token(tokenizer, text) for text in form]
        if None not in ids and len(set(ids)) == len(ids):  # words that it does not know may all be one token
            _, suffix, middle = ids
            assert suffix is not None and middle is not None
            first = tokenizer.encode(form.prefix, add_special_tokens=add_special, parse_special=True)
            return Gap(first, suffix, middle, list(_ends(tokenizer)))
    return None


def _ends(tokenizer: TokenizerLike) -> Iterator[int]:
    for text in ENDS:
        token = _token(tokenizer, text)
        if token is not None:
            yield token


def _token(tokenizer: TokenizerLike, text: str) -> int | None:
    """Return the token with this spelling; None if there is none."""
    try:
        ids = tokenizer.encode(text, parse_special=True)
    except ValueError:  # texts have no tokens
        return None
    return ids[0] if len(ids) == 1 else None
