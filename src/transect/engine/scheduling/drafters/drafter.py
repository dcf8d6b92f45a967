"""The interface of drafters: guesses of a sequence's next tokens, from token ids alone."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ....costs.steps import StepLoad

Timed = tuple[StepLoad, float]
"""The work of a step of a draft model, and its seconds."""


class Guess(NamedTuple):
    """Guessed next tokens of a sequence."""

    tokens: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    """Share of the matches that continue with each token, given the tokens before it; 1 if there is one match."""
    matched: int = 0
    """Length in tokens of the match that the guess is based on."""


class Drafter(Protocol):
    """Guesses of one method. It keeps what it needs of each sequence between calls, by ``seq_id``."""

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        """Guess up to ``most`` tokens after ``prompt`` and ``output``, which only grows from call to call."""
        ...

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Drop the state of a sequence that ended with these output tokens."""
        ...


class NoDrafter:
    """Guesses nothing."""

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        """Return an empty guess; see ``Drafter``."""
        return Guess()

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Do nothing; see ``Drafter``."""
