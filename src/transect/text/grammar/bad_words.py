"""Token sequences that an answer must not have (``bad_words``), as a constraint: alone, or around a grammar.

Which token would complete a sequence depends on the tokens before it, so this is known when a grammar's mask is: once
the tokens of the step before are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def spellings(words: Sequence[str], encode: Callable[..., Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the beginning of a text, and after a space.

    Args:
        encode: ``Tokenizer.encode``.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(encode(text, add_special_tokens=False, parse_special=False))
            if ids:
                found[ids] = None
    return tuple(found)


class WithoutSequences:
    """The state of one choice; see ``engine.constraint.Constraint``.

    Args:
        sequences: token ids that must not follow each other in the output.
        inner: further constraint on the answer; this object owns it.
    """

    __slots__ = ("_ends", "_longest", "_recent", "_sequences", "inner")

    def __init__(self, sequences: Sequence[tuple[int, ...]], inner: Any = None) -> None:
        self._sequences, self.inner = sequences, inner
        self._longest = max(map(len, sequences)) - 1
        self._recent: tuple[int, ...] = ()
        self._ends = frozenset(ids[0] for ids in sequences if len(ids) == 1)

    def fork(self) -> WithoutSequences:
        other = WithoutSequences(self._sequences, None if self.inner is None else self.inner.fork())
        other._recent = self._recent
        return other

    @property
    def terminated(self) -> bool:
        return self.inner is not None and self.inner.terminated

    def accept(self, token: int) -> str | None:
        """Advance by a token; see ``Constraint.accept``. The masks have excluded bad words, so only ``inner`` can
        refuse."""
        if self._longest:
            self._recent = (*self._recent, token)[-self._longest :]
        return None if self.inner is None else self.inner.accept(token)

    def forced(self) -> list[int]:
        """Return no tokens: a forced token could complete a bad word."""
        return []

    def banned(self) -> set[int]:
        """Return the tokens that would complete a sequence now."""
        recent, found = self._recent, set(self._ends)
        for ids in self._sequences:
            if 1 < len(ids) <= len(recent) + 1 and recent[len(recent) + 1 - len(ids) :] == ids[:-1]:
                found.add(ids[-1])
        return found

    def fill(self, words: Any) -> str | None:
        """Write the mask of the next token; see ``Constraint.fill``."""
        if self.inner is None:
            words[:] = -1
        elif (problem := self.inner.fill(words)) is not None:
            return problem
        self.amend(words)
        return None

    def amend(self, words: Any) -> None:
        """Remove the banned tokens from a mask."""
        for token in self.banned():
            word = (int(words[token >> 5]) & 0xFFFFFFFF) & ~(1 << (token & 31))
            words[token >> 5] = word - ((word >> 31) << 32)
