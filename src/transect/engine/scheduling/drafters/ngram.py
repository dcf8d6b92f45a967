"""Prompt lookup (Saxena 2023): copy the tokens that followed the longest earlier match of a sequence's last tokens.

Matches have ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens, as in vLLM; of equally long ones the newest counts.
How many of these continue alike says how sure a guess is: the number of an item in a list is always new.
"""

from __future__ import annotations

from .drafter import Guess
from .token_index import TokenIndex

SHORTEST, LONGEST = 2, 16
"""Defaults of ``prompt_lookup_min`` and ``prompt_lookup_max``, in tokens."""


class NgramDrafter:
    """Guesses from the sequence itself.

    Args:
        shortest, longest: tokens of a match.
    """

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        self._shortest, self._longest = shortest, longest
        self._indices: dict[int, TokenIndex] = {}

    def index(self, seq_id: int, prompt: tuple[int, ...], output: list[int]) -> TokenIndex:
        """Return the up-to-date index of a sequence."""
        index = self._indices.get(seq_id)
        if index is None:
            index = self._indices[seq_id] = TokenIndex(self._shortest)
            index.extend(prompt)
        index.extend(output[len(index) - len(prompt) :])
        return index

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        """Guess the tokens that followed the longest earlier match; see ``Drafter``."""
        index = self.index(seq_id, prompt, output)
        found = index.matches(index.tokens, self._longest)
        if not found:
            return Guess()
        longest = max(length for length, _ in found)
        newest, *others = [place for length, place in found if length == longest]
        tokens = index.copy_from(newest, most)
        shares = [1.0] * len(tokens)
        agreeing = [index.copy_from(place, most) for place in others]
        for at, token in enumerate(tokens):
            if not agreeing:
                break
            voters = 1 + len(agreeing)
            agreeing = [other for other in agreeing if other[at] == token]
            shares[at] = (1 + len(agreeing)) / voters
        return Guess(tokens, tuple(shares), longest)

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Drop the index of a sequence; see ``Drafter``."""
        self._indices.pop(seq_id, None)
