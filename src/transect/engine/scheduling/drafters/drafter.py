"""The interface of drafters: guesses of a sequence's next tokens, from token ids alone."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ....costs.steps import StepLoad

if TYPE_CHECKING:
    from ..constraint import Constraint

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


def under_grammar(constraint: Constraint, tokens: Sequence[int], stop_ids: Container[int]) -> tuple[int, ...]:
    """Fit drafts to a grammar: tokens that it forces take their places, and the rest is cut at the first token that is
    not allowed. Returns at most as many tokens; ``constraint`` is unchanged."""
    state, found = constraint.fork(), list[int]()
    for place, token in enumerate(tokens):
        if place < len(found):
            if found[place] != token:
                break
            continue
        if state.accept(token) is not None:
            break
        found.append(token)
        if token in stop_ids or state.terminated:
            break
        found += forced_after(state, len(tokens) - len(found), stop_ids)
    return tuple(found)


def forced_after(state: Constraint, most: int, stop_ids: Container[int]) -> list[int]:
    """Return up to ``most`` tokens that must come next, in front of a stop token; ``state`` accepts them."""
    found: list[int] = []
    for token in state.forced()[: max(most, 0)]:
        if token in stop_ids or state.accept(token) is not None:
            break
        found.append(token)
    return found


class NoDrafter:
    """Guesses nothing."""

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        """Return an empty guess; see ``Drafter``."""
        return Guess()

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Do nothing; see ``Drafter``."""
