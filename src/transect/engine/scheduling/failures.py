"""Choices that end because of a step's errors."""

from __future__ import annotations

from collections.abc import Callable

from .batch import ScheduledRow
from .request import Sequence


def failures(
    row: ScheduledRow, seq: Sequence, errors: dict[int, str], ignored: Callable[[int], bool] = lambda seq_id: False
) -> list[tuple[Sequence, str]]:
    """List the living choices of ``row`` that the errors of a step end, each with its message.

    Args:
        ignored: seq_ids whose errors mean nothing.
    """
    choices = seq.request.choices
    if not row.draws:
        error = errors.get(row.seq_id)
        # The choices may have been forked, by the next step in flight, from the prompt that failed.
        concerned = [seq] if any(choice.output_token_ids for choice in choices) else choices
        return [] if error is None else [(choice, error) for choice in concerned if choice.finish_reason is None]
    failed = [(choices[draw.choice], errors.get(draw.seq_id)) for draw in row.draws]
    return [
        (choice, error)
        for choice, error in failed
        if error is not None and choice.finish_reason is None and not ignored(choice.seq_id)
    ]
