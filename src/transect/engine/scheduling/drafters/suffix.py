"""Suffix decoding (Oliaro et al. 2024): guess by votes among matches in a sequence and in earlier answers.

The longest match wins; shorter ones vote only if none is longer. Each further token is the one that most of the
remaining matches continue with, so a guess knows how sure it is. The method's suffix tree is replaced by an index of
n-grams whose matches are lengthened token by token: the same matches, at a constant cost per token.
"""

from __future__ import annotations

from collections import Counter

from .drafter import Guess
from .ngram import LONGEST, SHORTEST, NgramDrafter
from .token_index import TokenIndex

KEPT_TOKENS = 200_000
"""Tokens of earlier answers that are searched; at twice as many, the older half is dropped."""
SEPARATOR = -1
"""Separator between two earlier answers; it matches no token."""
MARGIN = 2
"""Most tokens by which a voting match may be shorter than the longest."""


class SuffixDrafter:
    """Guesses from the sequence and from earlier answers.

    Args:
        shortest, longest: tokens of a match.
        kept: tokens of earlier answers to search.
    """

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST, kept: int = KEPT_TOKENS) -> None:
        self._own = NgramDrafter(shortest, longest)
        self._shortest, self._longest, self._kept = shortest, longest, kept
        self._answers = TokenIndex(shortest)

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        """Guess by votes among matches in the sequence and in earlier answers; see ``Drafter``."""
        own = self._own.index(seq_id, prompt, output)
        matches = [(length, own, place) for length, place in own.matches(own.tokens, self._longest)]
        earlier = self._answers.matches(own.tokens, self._longest) if len(self._answers) else []
        matches += [(length, self._answers, place) for length, place in earlier]
        if not matches:
            return Guess()
        longest = max(length for length, _, _ in matches)
        voters = [index.copy_from(place, most) for length, index, place in matches if length >= longest - MARGIN]
        tokens: list[int] = []
        shares: list[float] = []
        for at in range(most):
            votes = Counter(voter[at] for voter in voters if at < len(voter))
            if not votes:
                break
            token, count = votes.most_common(1)[0]
            if token == SEPARATOR:
                break
            tokens.append(token)
            shares.append(count / votes.total())
            voters = [voter for voter in voters if at < len(voter) and voter[at] == token]
        return Guess(tuple(tokens), tuple(shares), longest)

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Drop the state of a sequence and keep its output for later guesses; see ``Drafter``."""
        self._own.ended(seq_id, output)
        if len(self._answers) > 2 * self._kept:
            newest = self._answers.tokens[-self._kept :]
            self._answers = TokenIndex(self._shortest)
            self._answers.extend(newest)
        if len(output) > self._shortest:
            self._answers.extend([*output, SEPARATOR])
