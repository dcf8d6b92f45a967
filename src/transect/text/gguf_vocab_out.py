"""Conversion of a tokenizer and its chat template to the metadata of a GGUF file: the inverse of ``gguf_vocab.py``.

A GGUF file names how text is cut before pairs are merged (``pretokenizers.py``), and ``tokenizer.json`` writes it out,
each in its own way. So names are told by what they do: the one that cuts a text full of cases as this tokenizer does.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import pre_tokenizers

from .chat_template import ChatTemplate
from .gguf_pieces import BYTE, SPACE, UNKNOWN
from .gguf_vocab import CONTROL, USER_DEFINED
from .pretokenizers import PRE_TOKENIZERS
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from ..checkpoints.resolve import ModelSource

NORMAL, UNUSED = 1, 5
_BYTE = re.compile("<0x[0-9A-F]{2}>")
PREFERRED = ("smollm", "llama-bpe", "qwen2", "gpt-2", "tekken", "gpt-4o", "deepseek-v3", "smaug-bpe")
PROBE = (
    "Hello, world! It's 12345 o'clock; HE'LL say 3.14 -- (no)?\n\n  two  spaces\tand\ttabs \r\n\n1234567 a1b22c333 "
    "CamelCaseWord été naïve 你好世界 こんにちは Привет مرحبا १२३ Ⅰ Ⅱ "
    "😀🚀 ...///\\\\ $5+6=11 <|x|> `code` a_b-c  \n \n x' 's"
)


def gguf_vocabulary(source: ModelSource) -> dict[str, Any]:
    """Return the entries under ``tokenizer.`` of a model's GGUF file.

    Raises:
        ValueError: the model has no tokenizer, or one that is not byte-level BPE, or cuts text in a way that has no
            name in GGUF files.
    """
    folder = source.text_folder
    if folder is None:
        return {key: value for key, value in source.gguf.metadata.items() if key.startswith("tokenizer.")}
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which a GGUF file needs")
    tokenizer = Tokenizer.from_hf(folder)
    values = _vocabulary(folder, tokenizer, source.config.vocab_size)
    template = ChatTemplate.from_source(source)
    if template is not None:
        values["tokenizer.chat_template"] = template.source
        values |= {f"tokenizer.chat_template.{name}": text for name, text in template.variants.items()}
    return values


def _vocabulary(folder: Path, tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model.get("merges") or ()]
    bpe = model.get("type") == "BPE" and not model.get("byte_fallback") and "ByteLevel" in str(backend.decoder)
    pieces = model.get("type") == "BPE" and bool(model.get("byte_fallback")) and SPACE in str(backend.decoder)
    if not (bpe or pieces) or not pairs:
        raise ValueError(
            f"{path} is neither byte-level BPE nor SentencePiece's BPE with merges, and only such are written into "
            "GGUF files"
        )
    added = backend.get_added_tokens_decoder()
    by_id = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
    if max(by_id) >= rows:
        raise ValueError(f"{path} has {max(by_id) + 1} tokens, and the model {rows}: they do not belong together")
    kinds = []
    for index in range(rows):
        if index in added:
            kinds.append(CONTROL if added[index].special else USER_DEFINED)
        else:
            kinds.append(NORMAL if index in by_id else UNUSED)
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(rows)]
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if pieces:
        values |= _piece_entries(backend, model, tokens, kinds, pairs)
    else:
        values |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre_tokenizer_name(backend, bool(model.get("ignore_merges")), str(path)),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        }
    plain, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    values["tokenizer.ggml.add_bos_token"] = at > 0
    values["tokenizer.ggml.add_eos_token"] = len(whole) > at + len(plain)
    if tokenizer.bos_token_id is not None:
        values["tokenizer.ggml.bos_token_id"] = tokenizer.bos_token_id
    for key, end in zip(("eos", "eot", "eom"), tokenizer.eos_token_ids, strict=False):
        values[f"tokenizer.ggml.{key}_token_id"] = end
    return values


def _piece_entries(
    backend: tokenizers.Tokenizer,
    model: dict[str, Any],
    tokens: list[str],
    kinds: list[int],
    pairs: list[tuple[str, ...]],
) -> dict[str, Any]:
    """Return SentencePiece's entries, and correct ``kinds``. A token's score is the rank of its merge: earlier merges
    have higher scores."""
    rank: dict[str, int] = {}
    for number, pair in enumerate(pairs):
        rank.setdefault("".join(pair), number)
    for index, token in enumerate(tokens):
        if _BYTE.fullmatch(token):
            kinds[index] = BYTE
        elif token == model.get("unk_token"):
            kinds[index] = UNKNOWN
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(rank.get(token, len(pairs))) for token in tokens],
        "tokenizer.ggml.add_space_prefix": backend.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE),
    }
    if UNKNOWN in kinds:
        found["tokenizer.ggml.unknown_token_id"] = kinds.index(UNKNOWN)
    return found


def pre_tokenizer_name(backend: tokenizers.Tokenizer, ignore_merges: bool, what: str) -> str:
    """Return the name in GGUF files of a tokenizer's pre-tokenization.

    Raises:
        ValueError: none does the same.
    """
    if backend.pre_tokenizer is None:
        raise ValueError(f"{what} does not cut text before pairs are merged, which has no name in GGUF files")
    wanted = _pieces(backend.pre_tokenizer)
    nfc = "NFC" in str(backend.normalizer)
    fits = []
    for name in (*PREFERRED, *PRE_TOKENIZERS):
        known = PRE_TOKENIZERS[name]
        cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in known.patterns]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if known.ignore_merges == ignore_merges and _pieces(pre_tokenizers.Sequence([*cuts, last])) == wanted:
            fits.append((known.nfc != nfc, name))
    if not fits:
        raise ValueError(f"{what} cuts text in a way that has no name in GGUF files: llama.cpp could not do the same")
    return min(fits, key=lambda fit: fit[0])[1]


def _pieces(pre: Any) -> list[str]:
    return [piece for piece, _ in pre.pre_tokenize_str(PROBE)]
