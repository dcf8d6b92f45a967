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
        """Another choice in the same state."""
        ...

    def accept(self, token: int) -> str | None:
        """The choice's next token. Returns why it cannot be, or None."""
        ...

    @property
    def terminated(self) -> bool:
        """Nothing but an end of sequence may follow: the choice is complete without one. False after a failure, which
        ``fill`` and ``accept`` report from then on."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, one after another, because the masks of each of them have one bit."""
        ...

    def fill(self, words: Any) -> str | None:
        """Write the mask of the next token to an int32 array ``[ceil(V / 32)]``: bit i of word w says whether token
        32 w + i may come. Returns why there is none, or None."""
        ...


MaskFiller = Callable[[Sequence[Any], Any], "list[str | None]"]
"""``(constraints, words)``: ``Constraint.fill`` for each, into the rows of int32 ``[rows, W]``; the answers of all."""


def fill_each(constraints: Sequence[Constraint], words: Any) -> list[str | None]:
    """The plain ``MaskFiller``: one after another."""
    return [constraint.fill(words[row]) for row, constraint in enumerate(constraints)]
