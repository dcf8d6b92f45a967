"""SentencePiece vocabularies of GGUF files as `tokenizers` objects.

Two kinds. In both ``▁`` is a space, one is put before every text unless the file says no, and ``<0x0A>`` is a byte that
has no token of its own.

* ``llama`` (Llama 2, Mistral 7B, Gemma): pairs are merged, of all that are tokens the one with the highest score first.
  A list of merges says the same: each way to cut a token in two that are tokens, by the token's score.
* ``t5`` (Unigram): of all ways to cut a text, that with the highest sum of scores (Kudo 2018, arXiv:1804.10959).

Source of the fields: the GGUF specification in ggml's ``docs/gguf.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from .token_bytes import Spelling, spelling_of

MODELS = ("llama", "t5")
UNKNOWN, BYTE = 2, 6
"""Kinds in ``tokenizer.ggml.token_type``."""
SPACE = "▁"


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """Metadata of a SentencePiece vocabulary.

    Attributes:
        scores: one for each token.
        unknown: the id of the unknown token, or None.
        space_prefix: a space is put before every text.
        one_space: runs of spaces become one, and those at both ends go.
        charsmap: SentencePiece's compiled rules of normalisation; b"" for none.
        unspelled: tokens that their spelling in a text does not produce: control tokens, bytes, the unknown token.
    """

    tokens: list[str]
    scores: list[float]
    unknown: int | None
    space_prefix: bool = True
    one_space: bool = False
    charsmap: bytes = b""
    unspelled: tuple[str, ...] = ()


def piece_tokenizer(kind: str, pieces: SentencePieces) -> tuple[tokenizers.Tokenizer, Spelling]:
    """Return the tokenizer and how its tokens spell bytes.

    Raises:
        ValueError: scores that do not belong to the tokens, tokens that are listed twice, or rules of normalisation
            that cannot be read.
    """
    tokens = pieces.tokens
    if len(pieces.scores) != len(tokens):
        raise ValueError(
            f"the GGUF file has {len(tokens)} tokens but {len(pieces.scores)} scores: download or convert the model "
            "again"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(
            f"the GGUF file lists {len(tokens) - len(vocabulary)} of its {len(tokens)} tokens twice: its tokenizer is "
            "damaged, download or convert the model again"
        )
    model: models.Model
    if kind == "t5":
        scored = list(zip(tokens, pieces.scores, strict=True))
        model = models.Unigram(scored, unk_id=pieces.unknown, byte_fallback="<0x0A>" in vocabulary)
    else:
        unknown = None if pieces.unknown is None else tokens[pieces.unknown]
        pairs = merges_of(tokens, pieces.scores, set(pieces.unspelled))
        model = models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback="<0x0A>" in vocabulary)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = _normalizer(pieces)
    if kind == "t5" and (pattern := _first_of(pieces.unspelled)):
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if pieces.space_prefix else steps)
    return backend, spelling_of(json.loads(backend.decoder.__getstate__()))


def _normalizer(pieces: SentencePieces) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        try:
            steps.append(normalizers.Precompiled(pieces.charsmap))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(
                f"tokenizer.ggml.precompiled_charsmap of the GGUF file cannot be read ({str(error)[:100]}): download "
                "or convert the model again"
            ) from error
    if pieces.one_space:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if pieces.space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _first_of(unspelled: Sequence[str]) -> str:
    """Return a pattern of the first character of a token that text never becomes, followed by the rest of the token.
    Split after that character, the text cannot become that token, which a Unigram model would otherwise match by its
    spelling."""
    pairs = [f"{re.escape(token[0])}(?={re.escape(token[1:].replace(' ', SPACE))})" for token in unspelled if token[1:]]
    return "|".join(pairs)


def merges_of(
    tokens: Sequence[str], scores: Sequence[float], unspelled: Set[str] = frozenset()
) -> list[tuple[str, str]]:
    """List every way to split a token into two tokens, by descending score. Text never becomes an ``unspelled`` token,
    so no such token is merged or split."""
    known = set(tokens) - unspelled
    ranked = sorted(range(len(tokens)), key=lambda index: -scores[index])
    found = []
    for index in ranked:
        token = tokens[index]
        if token not in known:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                found.append((left, right))
    return found
