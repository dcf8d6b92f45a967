"""Find earlier places of the last tokens of a sequence, in constant time per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_PLACES = 16
"""Newest occurrences that are kept for each n-gram."""


class TokenIndex:
    """An append-only list of tokens, with the occurrences of each n-gram in it.

    Args:
        order: tokens of the n-grams, at least 1.
    """

    def __init__(self, order: int) -> None:
        self._order = order
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Positions that follow each n-gram, oldest first."""

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``."""
        own, order, places = self.tokens, self._order, self._places
        for token in tokens:
            own.append(token)
            if len(own) >= order:
                found = places.setdefault(tuple(own[-order:]), [])
                found.append(len(own))
                if len(found) > 2 * MOST_PLACES:
                    del found[:MOST_PLACES]

    def matches(self, context: Sequence[int], longest: int) -> list[tuple[int, int]]:
        """Find the occurrences of the end of ``context``, as (matching tokens, at most ``longest``; position after
        them), newest first. The end of the list itself is excluded."""
        order, own = self._order, self.tokens
        if len(context) < order:
            return []
        found = []
        for place in reversed(self._places.get(tuple(context[-order:]), ())):
            if place == len(own):
                continue
            length, limit = order, min(longest, place, len(context))
            while length < limit and own[place - 1 - length] == context[-1 - length]:
                length += 1
            found.append((length, place))
            if len(found) == MOST_PLACES:
                break
        return found

    def copy_from(self, place: int, count: int) -> tuple[int, ...]:
        """Copy ``count`` tokens from ``place`` on. Beyond the end of the list the copy repeats its own tokens; it is
        shorter only if it starts at the end."""
        copied = self.tokens[place : place + count]
        period = len(copied)
        while 0 < len(copied) < count:
            copied.append(copied[len(copied) - period])
        return tuple(copied)
