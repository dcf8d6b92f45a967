"""The bytes of a model's tokens, as grammars need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LONGEST_GREEDY = 32
"""Longest token, in bytes, that greedy encoding searches for."""


class TokenizerLike(Protocol):
    """Part of ``text.tokenizer.Tokenizer`` that grammars use."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, add_special_tokens: bool = ..., parse_special: bool = ...) -> list[int]: ...


@dataclass(slots=True)
class Vocabulary:
    """Tokens of a model.

    Attributes:
        tokens: bytes by id; b"" for an id that stands for no text.
        special_ids: tokens that are not text.
        eos_ids: tokens that end an answer; where the model has none, the last of ``tokens`` is made up for it.
        size: ids that the model's logits have.
        encode: function that tokenizes a text as the model would; None for greedy tokenization.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]
    size: int
    encode: Callable[[str], Sequence[int]] | None = None
    _ids: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: TokenizerLike, eos_ids: Sequence[int], size: int) -> Vocabulary:
        """Return the vocabulary of a tokenizer and the model that it belongs to.

        Args:
            eos_ids: may be empty.
            size: rows of the model's head; ids from the tokenizer's size on stand for nothing.
        """
        known = min(tokenizer.vocab_size, size)
        tokens = [tokenizer.token_bytes(index) for index in range(known)] + [b""] * (size - known)
        ends = [token for token in eos_ids if token < size]
        if not ends:
            tokens.append(b"<end>")
            ends = [size]
        special = sorted({index for index in tokenizer.special_ids if index < size}.union(ends))
        return cls(tokens, special, ends, size, tokenizer.encode)

    @property
    def special_names(self) -> dict[str, int]:
        """Special tokens by their spelling."""
        named = ((self.tokens[index].decode("utf-8", errors="replace"), index) for index in self.special_ids)
        return {name: index for name, index in named if name}

    def make(self) -> Any:
        """Build llguidance's tokenizer over this vocabulary."""
        import llguidance

        words: Any = _Words(self)
        return llguidance.LLTokenizer(words, n_vocab=len(self.tokens), eos_token=self.eos_ids)

    def spell(self, text: str) -> list[int]:
        """Encode text to tokens with exactly its bytes: by the model's tokenizer, if that keeps to the bytes (one that
        puts a space before every text does not), else greedily by the longest token."""
        data = text.encode("utf-8", errors="replace")
        if self.encode is not None:
            ids = list(self.encode(text))
            if b"".join([self.tokens[index] for index in ids]) == data:
                return ids
        if not self._ids:
            special = set(self.special_ids)
            self._ids = {token: index for index, token in enumerate(self.tokens) if token and index not in special}
        found = []
        while data:
            sizes = range(min(len(data), LONGEST_GREEDY), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break  # no token has this byte; llguidance continues with the others
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


class _Words:
    """The object that llguidance reads a vocabulary from."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self._spell = vocabulary.spell

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spell(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))
