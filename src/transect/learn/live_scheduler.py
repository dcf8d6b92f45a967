"""A student's scheduler inside the live engine: translates between it and ``EngineCore``.

``live_scheduler`` makes a class for ``--scheduler-cls``. Requests, tokens, stop conditions and outputs stay the shipped
scheduler's; who runs, how many tokens, and which KV blocks are the student's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.scheduling.batch import Clock, ScheduledBatch, ScheduledRow, StepResult
from ..engine.scheduling.outputs import EngineOutput, SchedulerStats
from ..engine.scheduling.request import Request, Sequence, Status
from ..engine.scheduling.scheduler import Scheduler
from ..engine.scheduling.scheduler_config import SchedulerConfig


def live_scheduler(make: Callable[[int, int, int, int], Any]) -> type[Scheduler]:
    """Make the class of a scheduler that asks the student's: ``make(num_blocks, block_size, max_tokens, max_seqs)`` has
    ``add``, ``schedule``, ``commit`` and ``finish`` as in the rung ``scheduler``."""

    class LiveScheduler(Scheduler):
        def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
            super().__init__(config, clock)
            if config.enable_prefix_caching or config.pipeline_depth > 1:
                raise ValueError(
                    "your scheduler has no prefix cache and no pipeline: give --no-prefix-caching, and no -pp"
                )
            if config.speculation is not None:
                raise ValueError("your scheduler plans no rows with drafts: leave out --speculative-config")
            self._begin()

        def _begin(self) -> None:
            config = self.config
            self._own = make(config.num_blocks, config.block_size, config.max_num_batched_tokens, config.max_num_seqs)
            self._by_id: dict[int, Sequence] = {}

        def add(self, request: Request) -> None:
            if request.params.n > 1:
                raise ValueError("your scheduler takes requests with n = 1")
            super().add(request)
            self._arrive(self.requests[request.request_id].leader)

        def _arrive(self, seq: Sequence) -> None:
            self._by_id[seq.seq_id] = seq
            self._own.add(seq.seq_id, seq.length)

        def schedule(self) -> ScheduledBatch | None:
            rows, sequences = [], []
            self._step += 1
            for seq_id, start, count, blocks in self._own.schedule():
                seq = self._by_id[seq_id]
                rows.append(self._row(seq, start, count, list(blocks)))
                sequences.append(seq)
            if not rows:
                return None
            batch = ScheduledBatch(self._step, tuple(rows))
            self._in_flight.append((batch, sequences))
            return batch

        def _row(self, seq: Sequence, start: int, count: int, blocks: list[int]) -> ScheduledRow:
            state, end = seq.request, start + count
            if seq.status is Status.WAITING:
                self.waiting.admit(seq, self.clock.now())
                seq.status = Status.RUNNING
                self.running.append(seq)
            if state.first_scheduled is None:
                state.first_scheduled = self.clock.now()
                self._prompt_tokens += seq.prompt_len
            self._preemptions += start == 0 and seq.scheduled > 0
            draws = seq.draws if end == seq.length else ()
            asked = state.asked(end)
            seq.block_ids, seq.scheduled, seq.last_step = blocks, end, self._step
            if draws:
                state.prompt_done = True
                seq.length = end + 1
            prompt, output = seq.prompt_token_ids, seq.output_token_ids
            return ScheduledRow(seq.seq_id, start, count, prompt, output, blocks, draws, *asked, adapter=seq.adapter)

        def commit(self, batch: ScheduledBatch, result: StepResult) -> list[EngineOutput]:
            outputs = super().commit(batch, result)
            for row in batch.rows:
                if row.draws and row.seq_id in self._by_id:
                    self._own.commit(row.seq_id)
            return outputs

        def _leave(self, seq: Sequence) -> None:
            if seq.status is Status.RUNNING:
                self.running.remove(seq)
            elif seq.status is Status.WAITING:
                self.waiting.remove(seq)
            if self._by_id.pop(seq.seq_id, None) is not None:
                self._own.finish(seq.seq_id)
            seq.block_ids, seq.status = [], Status.GONE

        def take_back(self, reason: str) -> list[EngineOutput]:
            outputs = super().take_back(reason)
            self._begin()
            for state in self.requests.values():
                self._arrive(state.leader)
            return outputs

        def stats(self) -> SchedulerStats:
            found = super().stats()
            found.kv_blocks_used = len({block for seq in self.running for block in seq.block_ids})
            return found

    return LiveScheduler
