"""Grammars without text: which tokens may come is a function of those that came before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Steps:
    """A constraint over few tokens. After the tokens t the allowed ones follow from hash((seed, t)); it is complete
    after ``length`` tokens, or with ``end`` wherever that is allowed.

    Args:
        forcing: of seven states, how many leave a single token.
        fails_at: the number of tokens after which it cannot go on, as a real one may find; None: never.
    """

    def __init__(
        self, seed: int, vocab: int, length: int, end: int = 0, fails_at: int | None = None, forcing: int = 0
    ) -> None:
        self.seed, self.vocab, self.length, self.end, self.fails_at = seed, vocab, length, end, fails_at
        self.forcing = forcing
        self.accepted: list[int] = []

    def fork(self) -> Steps:
        other = Steps(self.seed, self.vocab, self.length, self.end, self.fails_at, self.forcing)
        other.accepted = list(self.accepted)
        return other

    @property
    def terminated(self) -> bool:
        return len(self.accepted) >= self.length or self.end in self.accepted

    def allowed(self) -> frozenset[int]:
        if self.terminated:
            return frozenset((self.end,))
        return allowed_after(self.seed, self.vocab, self.accepted, self.end, self.forcing)

    def accept(self, token: int) -> str | None:
        if len(self.accepted) == self.fails_at:
            return "planned failure of the grammar"
        if token not in self.allowed():
            return f"token {token} is not among {sorted(self.allowed())}"
        self.accepted.append(token)
        return None

    def forced(self) -> list[int]:
        probe = self.fork()
        found: list[int] = []
        while not probe.terminated and len(probe.accepted) != self.fails_at and len(probe.allowed()) == 1:
            found += probe.allowed()
            probe.accepted.append(found[-1])
        return found

    def fill(self, words: np.ndarray) -> str | None:
        bits = np.zeros(len(words) * 32, np.uint8)
        bits[sorted(self.allowed())] = 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return None


def allowed_after(seed: int, vocab: int, tokens: Sequence[int], end: int = 0, forcing: int = 0) -> frozenset[int]:
    """At least one token other than ``end``, and ``end`` now and then; only one where that is forced."""
    state = hash((seed, *tokens))
    if state // 5 % 7 < forcing and (only := 1 + state // 35 % (vocab - 1)) != end:
        return frozenset((only,))
    found = {token for token in range(vocab) if hash((state, token)) % 3 == 0 and token != end}
    if state % 4 == 0:
        found.add(end)
    return frozenset((found - {end} and found) or {1 + state % (vocab - 1)})
