"""A tokenizer from the metadata of a GGUF file.

Of byte-level BPE the file holds the tokens, their kinds, the merges in order of rank and the name of the pre-tokenizer;
that is everything `tokenizers` needs. The tokens and merges go to it as they are, so that even a large vocabulary is
ready in a fraction of a second. SentencePiece vocabularies are made by ``gguf_pieces.py``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ..spec.fields import Fields, shown
from .gguf_pieces import BYTE, MODELS, UNKNOWN, SentencePieces, piece_tokenizer
from .pretokenizers import PreTokenizer, pre_tokenizer
from .token_bytes import BYTE_LEVEL, Spelling

CONTROL, USER_DEFINED = 3, 4
"""Kinds in ``tokenizer.ggml.token_type``: a token that only the model's protocol uses; a token that is text."""

TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<|end|>", "<|return|>",
    "<|call|>",
)  # fmt: skip
"""Tokens that end a model's turn, by spelling. Many files name only the end of a text (Gemma, Phi-3), or one of several
ends (gpt-oss); llama.cpp stops at these too."""
_ENDS = frozenset(TURN_ENDS)
_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """Vocabulary from the metadata: the `tokenizers` object and the special ids (None or () if there are none)."""

    backend: tokenizers.Tokenizer
    spelling: Spelling
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Build the tokenizer that the metadata describes.

    Args:
        metadata: the key-value pairs of the file (``GGUFFile.metadata``).

    Raises:
        ValueError: no tokenizer in the file, one of a kind that is not supported, or one that contradicts itself.
    """
    read = Fields(metadata, "the GGUF metadata", _PREFIX)
    model = metadata.get(_PREFIX + "model")
    if model == "gpt2":
        tokens, backend, add_bos = _byte_level(metadata)
        spelling = BYTE_LEVEL
    elif model in MODELS:
        tokens = _strings(metadata, "tokens")
        backend, spelling = piece_tokenizer(str(model), _pieces(metadata, tokens))
        add_bos = model == "llama"
    else:
        missing = "holds no tokenizer (tokenizer.ggml.model is missing)"
        found = missing if model is None else f"holds a {shown(model)} one"
        raise ValueError(
            "byte-level BPE and SentencePiece tokenizers (tokenizer.ggml.model = 'gpt2', 'llama' or 't5') are read "
            f"from GGUF files, and this file {found}: use the model's directory with its tokenizer.json"
        )
    backend.add_tokens(_added_tokens(metadata, tokens))

    bos = _token_id(metadata, "bos", len(tokens))
    ends = [_token_id(metadata, key, len(tokens)) for key in ("eos", "eot", "eom")]
    eos_ids = tuple(dict.fromkeys(end for end in (*ends, *_turn_ends(tokens)) if end is not None))
    add_bos = read.flag("add_bos_token", add_bos)
    add_eos = read.flag("add_eos_token", model == "t5")
    return GGUFVocabulary(
        backend=backend,
        spelling=spelling,
        bos_token_id=bos,
        eos_token_ids=eos_ids,
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(ends[0],) if add_eos and ends[0] is not None else (),
    )


def _turn_ends(tokens: list[str]) -> list[int]:
    """Return the tokens that end a turn, in the order of ``TURN_ENDS``. If there is ``<|return|>``, ``<|end|>`` ends a
    message and not a turn."""
    found = {token: index for index, token in enumerate(tokens) if token in _ENDS}
    if "<|return|>" in found:
        found.pop("<|end|>", None)
    return [found[token] for token in TURN_ENDS if token in found]


def _byte_level(metadata: Mapping[str, Any]) -> tuple[list[str], tokenizers.Tokenizer, bool]:
    """Return the tokens, their tokenizer, and True if a text begins with BOS when the file has no setting."""
    tokens = _strings(metadata, "tokens")
    merges = _strings(metadata, "merges")
    pre = _pre_tokenizer(metadata)
    backend = tokenizers.Tokenizer(_bpe(tokens, merges, pre))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_step])
    backend.decoder = decoders.ByteLevel()
    return tokens, backend, pre.add_bos


def _pieces(metadata: Mapping[str, Any], tokens: list[str]) -> SentencePieces:
    read = Fields(metadata, "the GGUF metadata", _PREFIX)
    scores = _listed(metadata.get(_PREFIX + "scores", ()), "scores")
    if not all(isinstance(score, (int, float)) and math.isfinite(score) for score in scores):
        raise ValueError(
            "tokenizer.ggml.scores of the GGUF file must be finite numbers: download or convert the model again"
        )
    kinds = _kinds(metadata, tokens)
    unknown = _token_id(metadata, "unknown", len(tokens))
    charsmap = _listed(metadata.get(_PREFIX + "precompiled_charsmap", ()), "precompiled_charsmap")
    return SentencePieces(
        tokens,
        [float(score) for score in scores],
        unknown if unknown is not None else next((i for i, kind in enumerate(kinds) if kind == UNKNOWN), None),
        space_prefix=read.flag("add_space_prefix", True),
        one_space=read.flag("remove_extra_whitespaces", False),
        charsmap=bytes(byte & 255 for byte in charsmap),
        unspelled=tuple(tokens[i] for i, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL, BYTE)),
    )


def gguf_chat_template(metadata: Mapping[str, Any]) -> tuple[str | None, str, str]:
    """Return (template or None, text of the BOS token, text of the EOS token; "" for a token that the file does not
    name).

    Raises:
        ValueError: the file has no tokens, or names one that it does not have.
    """
    tokens = _strings(metadata, "tokens")
    bos, eos = (_token_id(metadata, which, len(tokens)) for which in ("bos", "eos"))
    found = metadata.get("tokenizer.chat_template")
    template = None if found is None else Fields(metadata, "the GGUF metadata").text("tokenizer.chat_template")
    return template, "" if bos is None else tokens[bos], "" if eos is None else tokens[eos]


def gguf_chat_variants(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return further chat templates in the file, by name (``tokenizer.chat_template.tool_use``)."""
    prefix = "tokenizer.chat_template."
    return {
        key.removeprefix(prefix): text
        for key, text in metadata.items()
        if key.startswith(prefix) and isinstance(text, str)
    }


def _bpe(tokens: list[str], merges: list[str], pre: PreTokenizer) -> models.BPE:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(
            f"the GGUF file lists {len(tokens) - len(vocab)} of its {len(tokens)} tokens twice: its tokenizer is "
            "damaged, download or convert the model again"
        )
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:
        raise ValueError(
            f"the merges of the GGUF file do not fit its tokens ({error}): download or convert the model again"
        ) from error


def _kinds(metadata: Mapping[str, Any], tokens: list[str]) -> list[Any]:
    """Return the kind of each token; [] if the file has none."""
    kinds = _listed(metadata.get(_PREFIX + "token_type", ()), "token_type")
    if kinds and len(kinds) != len(tokens):
        raise ValueError(
            f"the GGUF file has {len(tokens)} tokens but {len(kinds)} token types: download or convert the model again"
        )
    return kinds


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[AddedToken]:
    return [
        AddedToken(tokens[index], special=kind != USER_DEFINED, normalized=False)
        for index, kind in enumerate(_kinds(metadata, tokens))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get(_PREFIX + "pre")
    if name is None:
        warnings.warn(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): 'default' is used, and text may be "
            "cut otherwise than the model was trained on; a newly converted file names it",
            stacklevel=2,
        )
        name = "default"
    if not isinstance(name, str):
        raise ValueError(f"'tokenizer.ggml.pre' in the GGUF metadata must be a string, not {shown(name)}")
    return pre_tokenizer(name)


def _token_id(metadata: Mapping[str, Any], which: str, count: int) -> int | None:
    value = Fields(metadata, "the GGUF metadata", _PREFIX).token_id(f"{which}_token_id")
    if value is None:
        return None
    if value >= count:
        raise ValueError(
            f"the GGUF file's {which}_token_id is {value}, but it has {count} tokens: download or convert the model "
            "again"
        )
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _listed(metadata.get(_PREFIX + key, ()), key)
    if not values or not all(isinstance(value, str) for value in values):
        raise ValueError(
            f"the GGUF file has no list of strings under tokenizer.ggml.{key}: download or convert the model again"
        )
    return values


def _listed(values: Any, key: str) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"'{_PREFIX}{key}' in the GGUF metadata must be a list, not {shown(values)}")
    return list(values)
