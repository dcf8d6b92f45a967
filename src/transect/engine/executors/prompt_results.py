"""Collect a step's results for prompts, apart from drawn tokens: logprobs and pooled vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...models.decoder import Decoder
from ..scheduling.batch import ScheduledRow, StepResult, TokenLogprobs
from .sampler import token_logprobs

LOGPROB_ROWS = 32
"""Rows of logits held at a time for prompt logprobs; a vocabulary of 128k takes 16 MiB."""


def prompt_results(
    model: Decoder, rows: Sequence[ScheduledRow], starts: Sequence[int], hidden_TD: Tensor
) -> StepResult:
    """Build a result without draws: prompt logprobs and pooled vectors of the rows that ask for them.

    Args:
        model: makes logits of hidden states.
        starts: index of each row's first token.
        hidden_TD: hidden states ``[T, D]`` after the final norm.
    """
    result = StepResult({}, pooled=_pooled(rows, starts, hidden_TD))
    for row, start in zip(rows, starts, strict=True):
        if scored := row.scored:
            first = start + scored.start - 1 - row.start
            part = hidden_TD[first : first + len(scored)]
            result.prompt_logprobs[row.seq_id] = _prompt_logprobs(model, row, part)
    return result


def _prompt_logprobs(model: Decoder, row: ScheduledRow, hidden_TD: Tensor) -> tuple[TokenLogprobs, ...]:
    """Return one entry for each position of ``row.scored``, from the hidden states that predict them."""
    following = row.prompt_token_ids[row.scored.start : row.scored.stop]
    entries: list[TokenLogprobs] = []
    for first in range(0, len(following), LOGPROB_ROWS):
        part = following[first : first + LOGPROB_ROWS]
        logits_RV = model.logits(hidden_TD[first : first + len(part)])
        entries.extend(token_logprobs(logits_RV, part, [row.prompt_logprobs or 0] * len(part)))
    return tuple(entries)


def _pooled(rows: Sequence[ScheduledRow], starts: Sequence[int], hidden_TD: Tensor) -> dict[int, Any]:
    """Return the pooled vectors by seq_id, float64 ``[D]``, of rows with ``pooling``.

    Args:
        starts: index of each row's first token.
        hidden_TD: hidden states after the final norm.
    """
    found: dict[int, Tensor] = {}
    for row, start in zip(rows, starts, strict=True):
        end = start + row.num_tokens
        if row.pooling == "mean":
            found[row.seq_id] = hidden_TD[start:end].sum(0, dtype=torch.float64)
        elif row.pooling is not None and row.draws:
            found[row.seq_id] = hidden_TD[end - 1].double()
    if not found:
        return {}
    return dict(zip(found, torch.stack(list(found.values())).cpu().numpy(), strict=True))
