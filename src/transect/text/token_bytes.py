"""Convert tokens to bytes, for the two ways in which vocabularies spell bytes.

* Byte level (GPT-2 and after): each of the 256 bytes is spelled as one printable character; a space is ``Ġ``.
* Sentence pieces (Llama 2, Mistral 7B): ``▁`` is a space, ``<0x0A>`` is a byte that has no token of its own, and a
  space is put before every text, which the first token then carries and decoding takes off again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_characters() -> dict[str, int]:
    """Map characters to bytes, as in GPT-2: printable Latin-1 characters represent themselves, and the characters from
    U+0100 on represent the other bytes, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Spelling:
    """Spelling of bytes by the tokens of one vocabulary.

    Attributes:
        byte_level: byte-level characters; otherwise tokens are plain text with ``replacements`` and ``byte_tokens``.
        replacements: (from, to) strings replaced in every token, in order; the usual one is ("▁", " ").
        byte_tokens: tokens written ``<0xHH>`` are single bytes.
        leading_space: the space before every text is taken off when decoding.
        space_before: each token is a word, and brings the space before it.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_tokens: bool = False
    leading_space: bool = False
    space_before: bool = False

    def bytes_of(self, token: str, *, literal: bool = False) -> bytes:
        """Return the bytes of one token.

        ``literal``: an added token, which byte-level vocabularies hold as plain text.
        """
        if self.byte_level:
            if not literal:
                table = byte_characters()
                try:
                    return bytes([table[char] for char in token])
                except KeyError:
                    pass  # not spelled in bytes: plain text, as the byte-level decoder of `tokenizers` has it
            return token.encode()
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return f" {token}".encode() if self.space_before else token.encode()


BYTE_LEVEL = Spelling(byte_level=True)


def spelling_of(decoder: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None = None) -> Spelling:
    """Read the ``decoder`` section of a tokenizer.json.

    Where there is none, what the ``pre_tokenizer`` does to text is undone, if that is byte level or Metaspace; else
    tokens are words, with a space between, as in transformers.

    Raises:
        ValueError: it works in a way that is not supported; the message names it.
    """
    steps = _flatten(decoder) or [
        step for step in _flatten(pre_tokenizer) if step.get("type") in ("ByteLevel", "Metaspace")
    ]
    if not steps:
        return Spelling(False, space_before=True, leading_space=True)
    if any(step.get("type") == "ByteLevel" for step in steps):
        return BYTE_LEVEL
    replacements: list[tuple[str, str]] = []
    byte_tokens = leading_space = False
    for step in steps:
        kind = step.get("type")
        if kind == "Replace" and "String" in step.get("pattern", {}):
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            byte_tokens = True
        elif kind == "Metaspace":
            replacements.append((step.get("replacement", "▁"), " "))
            leading_space = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step.get("content") == " " and step.get("start") in (0, 1) and not step.get("stop"):
            leading_space = step["start"] == 1
        elif kind != "Fuse":
            raise ValueError(
                f"the tokenizer's decoder {json.dumps(step, ensure_ascii=False)} is not supported: byte-level ones and "
                "those made of Replace, ByteFallback, Fuse, Strip and Metaspace are"
            )
    return Spelling(False, tuple(replacements), byte_tokens, leading_space)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or decoder.get("pretokenizers") or []
        return [step for part in parts for step in _flatten(part)]
    return [decoder]
