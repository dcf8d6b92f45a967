"""Define constraints on an answer's form as bit masks of the tokens that may come next. Grammars work on text.

A constraint belongs to one choice of a request and advances with each of its tokens when the scheduler learns of them
(``Scheduler.commit``). So a step's masks can be made once all tokens before it are known: where steps are planned
ahead, that is after they were submitted, while the device computes them (``Handle.draw``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Constraint(Protocol):
    """The state of one choice under its grammar (``text.grammar.constraint.GrammarConstraint``)."""

    def fork(self) -> Constraint:
        """Return a copy for another choice, in the same state."""
        ...

    def accept(self, token: int) -> str | None:
        """Advance by the choice's next token. Returns the reason if the token is not allowed, else None."""
        ...

    @property
    def terminated(self) -> bool:
        """True if only an end of sequence may follow: the choice is complete without one. False after a failure, which
        ``fill`` and ``accept`` report from then on."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that must come next, in order, because each of their masks has one bit."""
        ...

    def fill(self, words: Any) -> str | None:
        """Write the mask of the next token to an int32 array ``[ceil(V / 32)]``: bit i of word w is 1 if token 32 w + i
        is allowed. Returns an error if there is no mask, else None."""
        ...


MaskFiller = Callable[[Sequence[Any], Any], "list[str | None]"]
"""Function ``(constraints, words)`` that calls ``Constraint.fill`` for each row of int32 ``[rows, W]``, and returns the
errors of all."""


def fill_each(constraints: Sequence[Constraint], words: Any) -> list[str | None]:
    """Fill the masks sequentially: the plain ``MaskFiller``."""
    return [constraint.fill(words[row]) for row, constraint in enumerate(constraints)]
