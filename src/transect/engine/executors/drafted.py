"""Verify drafts with any executor: each draft is a row of one token, beside the row of the last known token.

The rows share a block table and lie at consecutive positions. All keys and values of a layer are written before its
attention reads them, so a draft's row sees the drafts before it. Every row draws with the seed, choice and position of
the sequence: the draws are those that steps of one token would make, as long as the drafts before them are right.
A step with drafts is a decode step of more rows by the same kernels, with CUDA graphs of its own, because its rows wait
for each other's keys (``StepPlan.fresh``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..scheduling.batch import Draw, Executor, Handle, ScheduledBatch, ScheduledRow, StepResult, TokenLogprobs
from .penalties import is_penalised

FIRST_VIRTUAL = 1 << 40
"""First number for rows of drafts; sequences have lower numbers."""
MOST = 64
"""Most drafts of a row."""


class Drafted:
    """Passes batches to an executor; each draft becomes a row of its own.

    Args:
        executor: runs rows without drafts. Other attributes of this object are the executor's.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, batch: ScheduledBatch) -> Handle:
        """Submit the batch; see ``Executor``."""
        if batch.again or not any(row.drafts for row in batch.rows):
            return self._executor.submit(batch)
        rows: list[ScheduledRow] = []
        for row in batch.rows:
            rows += _rows_of(row, batch.step) if row.drafts else [row]
        single = ScheduledBatch(batch.step, tuple(rows), batch.block_copies)
        return _Verified(batch, single, self._executor.submit(single))


class _Verified:
    """The handle of a batch with drafts."""

    def __init__(self, batch: ScheduledBatch, single: ScheduledBatch, handle: Handle) -> None:
        self._batch, self._single, self._handle = batch, single, handle

    def draw(self) -> None:
        """Launch the draws of the step."""
        self._handle.draw()

    def result(self) -> StepResult:
        """Accept the leading drafts of each row that equal the draws."""
        found = self._handle.result()
        result = StepResult({}, {}, found.prompt_logprobs, found.pooled)
        rows = iter(self._single.rows)
        for row in self._batch.rows:
            singles = [next(rows) for _ in range(1 + len(row.drafts))]
            if not row.drafts:
                for seq_id in [draw.seq_id for draw in row.draws] or [row.seq_id]:
                    _move(found, seq_id, result, seq_id)
                continue
            accepted: list[int] = []
            logprobs: list[TokenLogprobs] = []
            for draft, single in zip(row.drafts, singles, strict=False):
                if found.tokens.get(single.seq_id) != draft:
                    break
                accepted.append(draft)
                if single.seq_id in found.logprobs:
                    logprobs.append(found.logprobs[single.seq_id])
            _move(found, singles[len(accepted)].seq_id, result, row.seq_id)
            result.accepted[row.seq_id] = accepted
            result.accepted_logprobs[row.seq_id] = logprobs
        return result


def _move(found: StepResult, seq_id: int, result: StepResult, to: int) -> None:
    """Move the results of ``seq_id`` to the number ``to``."""
    if seq_id in found.tokens:
        result.tokens[to] = found.tokens[seq_id]
    if seq_id in found.logprobs:
        result.logprobs[to] = found.logprobs[seq_id]
    if seq_id in found.errors:
        result.errors[to] = found.errors[seq_id]
    if seq_id in found.sound:
        result.sound.add(to)


def _rows_of(row: ScheduledRow, step: int) -> list[ScheduledRow]:
    """Split a row with drafts into the row of the known tokens and one row for each draft."""
    rows = [msgspec.structs.replace(row, num_tokens=row.num_tokens - len(row.drafts), drafts=())]
    (draw,) = row.draws
    follows = draw.constraint is not None or is_penalised(draw)
    # Executors remember a sequence's tokens: the newest, which the next step may read on the device, and with penalties
    # all of them. After wrong drafts that memory is wrong, so numbers are not used again too soon, or never.
    first = FIRST_VIRTUAL * (2 + step if follows else step % 2 + 1) + row.seq_id * MOST
    for at, draft in enumerate(row.drafts):
        made = msgspec.structs.replace(draw, seq_id=first + at)
        if follows:
            made = _after(made, row.drafts[: at + 1])
        changes = {"seq_id": made.seq_id, "start": row.known_end + at, "num_tokens": 1, "draws": (made,)}
        rows.append(msgspec.structs.replace(row, drafts=(draft,), **changes))
    return rows


def _after(draw: Draw, drafts: tuple[int, ...]) -> Draw:
    """Return the draw as it would be after ``drafts``: penalties count them, and the grammar has accepted them."""
    constraint = draw.constraint
    if constraint is not None:
        constraint = constraint.fork()
        for token in drafts:
            constraint.accept(token)
    return msgspec.structs.replace(draw, output_token_ids=[*draw.output_token_ids, *drafts], constraint=constraint)
