"""Drafts for simulations: right at a given share of positions, where the tokens to come are given."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from .drafter import Guess


class Ahead:
    """An iterator of tokens that can be looked ahead of.

    Args:
        tokens: iterator of the tokens.
    """

    def __init__(self, tokens: Iterator[int]) -> None:
        self._tokens = tokens
        self._seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return self._seen.pop(0) if self._seen else next(self._tokens)

    def peek(self, count: int) -> list[int]:
        """Return the next ``count`` tokens, fewer at the end, and leave them there."""
        while len(self._seen) < count:
            token = next(self._tokens, None)
            if token is None:
                break
            self._seen.append(token)
        return self._seen[:count]


class PlannedDrafter:
    """Guesses that are right with a given chance at each position.

    Args:
        acceptance: the chance that a draft is right if those before it are, from 0 to 1.
        outputs: the tokens to come, by seq_id.
    """

    def __init__(self, acceptance: float, outputs: Mapping[int, Iterator[int]]) -> None:
        self.acceptance, self._outputs = acceptance, outputs
        self._right: dict[int, list[bool]] = {}
        """Draws by seq_id and position: a position is guessed several times."""

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        """Guess tokens, see ``Drafter``. A position is right or wrong whenever it is guessed."""
        coming = self._outputs[seq_id]
        assert isinstance(coming, Ahead)
        ahead, first = coming.peek(most), len(output)
        right = self._right.setdefault(seq_id, [])
        while len(right) < first + len(ahead):
            right.append(random.Random(seq_id << 32 | len(right)).random() < self.acceptance)
        tokens = [token if right[at] else token ^ 1 for at, token in enumerate(ahead, first)]
        return Guess(tuple(tokens), (1.0,) * len(tokens), 4)

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Forget the draws of a sequence; see ``Drafter``."""
        self._right.pop(seq_id, None)
