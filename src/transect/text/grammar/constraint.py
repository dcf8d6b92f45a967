"""The state of one answer under a grammar, and the masks of many answers at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .bad_words import WithoutSequences
from .complaints import explain

ALONE_S = 0.002
"""Seconds for which masks are made sequentially; if the remaining ones would take as long again, several threads make
them. A mask usually takes some microseconds, and waking threads takes longer than all masks of a step; some grammars
take a hundred times as long."""


class GrammarConstraint:
    """Grammar state of one answer; implements ``engine.constraint.Constraint``.

    Args:
        matcher: llguidance's, at the beginning of an answer; this object owns it.
        field: name of the grammar in error messages.
    """

    __slots__ = ("_field", "_matcher")

    def __init__(self, matcher: Any, field: str) -> None:
        self._matcher = matcher
        self._field = field

    def fork(self) -> GrammarConstraint:
        """Return a copy for another answer in the same state."""
        return GrammarConstraint(self._matcher.deep_copy(), self._field)

    @property
    def terminated(self) -> bool:
        """True if only the end can follow. False if the grammar has failed, because the answer is not complete then."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """True if the answer so far is complete."""
        return self._matcher.is_accepting()

    def accept(self, token: int) -> str | None:
        """Advance by the next token of the answer. Returns an error, or None."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return None  # the end itself, or a token that is never shown
        return None if self._matcher.consume_token(token) else self._complaint()

    def forced(self) -> list[int]:
        """Return the tokens that must come next, because no others can."""
        return self._matcher.compute_ff_tokens()

    def fill(self, words: np.ndarray) -> str | None:
        """Write the mask of the next token: int32 ``[ceil(V / 32)]``, bit i of word w is token 32 w + i.

        Returns what is wrong, or None.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return self._complaint() if self._matcher.is_error() else None

    def _complaint(self) -> str:
        return f"the answer cannot go on under the grammar of {self._field}: {explain(self._matcher.get_error())}"


class MaskFiller:
    """Fills the masks of a step's rows: sequentially as long as that is fast, the rest by several threads.

    Args:
        alone_s: see ``ALONE_S``; 0 makes all but the first by threads.
    """

    def __init__(self, alone_s: float = ALONE_S) -> None:
        self._alone_s = alone_s
        self._executor: Any = None

    def __call__(self, constraints: Sequence[Any], words: np.ndarray) -> list[str | None]:
        """Fill row i of int32 ``[rows, W]`` for constraint i (``GrammarConstraint``, or ``WithoutSequences`` around
        one). Returns an error or None for each."""
        problems: list[str | None] = [None] * len(constraints)
        grammars: list[tuple[GrammarConstraint, int]] = []
        for row, constraint in enumerate(constraints):
            inner = getattr(constraint, "inner", constraint)
            if isinstance(inner, GrammarConstraint):
                grammars.append((inner, row))
            else:
                problems[row] = constraint.fill(words[row])
        self._fill(grammars, words, problems)
        for row, constraint in enumerate(constraints):
            if isinstance(constraint, WithoutSequences) and constraint.inner is not None and problems[row] is None:
                constraint.amend(words[row])
        return problems

    def _fill(
        self, grammars: Sequence[tuple[GrammarConstraint, int]], words: np.ndarray, problems: list[str | None]
    ) -> None:
        start, stride, nbytes = words.ctypes.data, words.strides[0], words.itemsize * words.shape[1]
        left: Sequence[tuple[GrammarConstraint, int]] = ()
        began = time.perf_counter()
        for at, (constraint, row) in enumerate(grammars):
            constraint._matcher.unsafe_compute_mask_ptr(start + row * stride, nbytes)
            taken = time.perf_counter() - began
            if taken > self._alone_s and taken * (len(grammars) - at - 1) > self._alone_s * (at + 1):
                left = grammars[at + 1 :]
                break
        if left:
            if self._executor is None:
                import llguidance

                self._executor = llguidance.LLExecutor()
            pairs = [(constraint._matcher, row) for constraint, row in left]
            self._executor.unsafe_compute_mask_ptr(pairs, start, stride, len(words))
        for constraint, row in grammars:
            if constraint._matcher.is_error():
                problems[row] = constraint._complaint()
