"""Runs a decision log through the shipping scheduler again, event by event, and compares every decision.

A log holds no tokens. ``ReplayScript`` makes up tokens that mean the same to the scheduler: the last token of each full
KV block stands for the block's hash, so the prefix cache finds exactly what it found; an answer that ended at a stop
token ends with one. With nothing changed every step must come out as it was: the same rows, copies, reasons and free
blocks. ``simulate.py`` runs the same requests on a virtual clock with something changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...costs.steps import StepLoad
from ...engine.scheduling.batch import ScheduledBatch, StepResult
from ...engine.scheduling.clock import VirtualClock
from ...engine.scheduling.decisions import DIGEST_BYTES, Aborted, Added, CacheReset, Done, Filled, Planned, TakenBack
from ...engine.scheduling.policies.speculation import Speculation
from ...engine.scheduling.request import Request, Sequence
from ...engine.scheduling.sampling_params import SamplingParams
from ...engine.scheduling.scheduler import Scheduler
from ...engine.scheduling.scheduler_config import SchedulerConfig
from .log import DecisionRunLog, Life, StepRow, last_rows_on, rows_of

DAMAGED = "records of this log are missing or damaged, so it cannot be run again"
STOP = 2**31 - 1
"""Token that ends an answer of a script; block numbers are smaller."""


class _AnyAnswer:
    """A grammar for requests that had one: the script has the tokens, and the log the number of forced ones."""

    terminated = False

    def fork(self) -> _AnyAnswer:
        return self

    def accept(self, token: int) -> str | None:
        return None

    def forced(self) -> list[int]:
        return []

    def fill(self, words: Any) -> str | None:
        return None


class ReplayScript:
    """Tokens of a log's requests, equal to the real ones as far as the scheduler can tell."""

    def __init__(self, log: DecisionRunLog) -> None:
        self.log = log
        self.block_size: int = log.header.scheduler["block_size"]
        self._numbers: dict[bytes, int] = {}
        """Number of each block hash, from 1."""
        self._private = 2**30
        """Next number for a block with an unknown hash."""

    def request(self, life: Life, name: str | None = None, arrival: float | None = None) -> Request:
        """Build a request with the same settings."""
        added = life.added
        # All choices share the prompt; one that ended early may know the hashes of its beginning only.
        hashes = max((each[2] for each in life.ends.values()), key=len, default=b"")
        prompt = tuple(self._tokens(hashes, 0, added.prompt_tokens))
        stops = [STOP] if any(reason == "stop" for reason, _, _ in life.ends.values()) else []
        params = SamplingParams(
            n=added.n,
            max_tokens=added.max_tokens,
            ignore_eos=True,
            stop_token_ids=stops,
            seed=0,
            prompt_logprobs=0 if added.prompt_logprobs else None,
            prompt_logprobs_start=added.prompt_logprobs_start,
        )
        grammar = _AnyAnswer() if added.grammar else None
        given = None
        if added.known is not None:
            begins = ((choice, added.prompt_tokens, count) for choice, count in enumerate(added.known))
            given = tuple(
                None if count < 0 else tuple(self._answer(life, choice, start, start + count))
                for choice, start, count in begins
            )
        return Request(
            name or added.request_id,
            prompt,
            params,
            added.priority,
            arrival,
            constraint=grammar,
            client=added.client,
            weight=added.weight,
            pooling=added.pooling,
            output_token_ids=given,
            adapter=added.adapter,
            given=added.given,
        )

    def output(self, life: Life, choice: int) -> Iterator[int]:
        """Yield the tokens that a choice draws; tokens after its end are those that a step in flight would have
        drawn."""
        start = life.added.prompt_tokens
        known = 0 if life.added.known is None else max(0, life.added.known[choice])
        yield from self._answer(life, choice, start + known, start + life.ends.get(choice, ("", 0, b""))[1])
        while True:
            yield 0

    def _answer(self, life: Life, choice: int, start: int, end: int) -> Iterator[int]:
        """Yield the tokens of an answer at positions ``start .. end - 1``."""
        reason, count, hashes = life.ends.get(choice, ("", 0, b""))
        last = life.added.prompt_tokens + count - 1 if reason == "stop" else -1
        for position in range(start, end):
            yield STOP if position == last else self._token(hashes, position)

    def _tokens(self, hashes: bytes, start: int, end: int) -> list[int]:
        return [self._token(hashes, position) for position in range(start, end)]

    def _token(self, hashes: bytes, position: int) -> int:
        block, rest = divmod(position + 1, self.block_size)
        if rest:
            return 0
        at = DIGEST_BYTES * (block - 1)
        if at + DIGEST_BYTES > len(hashes):
            self._private += 1
            return self._private
        return self._numbers.setdefault(hashes[at : at + DIGEST_BYTES], len(self._numbers) + 1)


class RecordedDrafts(Speculation):
    """Drafts the recorded number of tokens for each row."""

    rows: Mapping[int, int] = {}
    """Tokens of the next step's rows, by seq_id."""

    def drafts(self, sequences: Listed[Sequence], room: int, *, known: bool = True) -> dict[int, tuple[int, ...]]:
        """Return the recorded number of draft tokens; see ``Speculation``. Their values do not matter to the
        scheduler."""
        counts = {seq.seq_id: self.rows.get(seq.seq_id, 1) - 1 for seq in sequences}
        found = {seq_id: (0,) * count for seq_id, count in counts.items() if count > 0}
        self.worthwhile = bool(found)
        return found


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that came out differently: what was recorded, and what the replay did."""

    step: int
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"step {self.step}: recorded {self.recorded}; replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """``decisions`` were compared, steps that could not be planned among them; ``difference`` is the first."""

    decisions: int
    rows: int
    difference: Difference | None


def replay(log: DecisionRunLog) -> Replayed:
    """Run the log again with nothing changed.

    Raises:
        ValueError: the log does not begin with the start of its engine, or has holes.
    """
    if not log.complete:
        raise ValueError(
            "the beginning of this log is missing (it came out of a ring in memory): a replay needs a file that "
            "--decision-log wrote from the start"
        )
    return _Replay(log).run()


class _Replay:
    def __init__(self, log: DecisionRunLog) -> None:
        self.log = log
        self.script = ReplayScript(log)
        self.scheduler = Scheduler(SchedulerConfig(**log.header.scheduler), VirtualClock())
        if self.scheduler.speculation is not None:
            self.scheduler.speculation = RecordedDrafts(self.scheduler.speculation.config, self.scheduler.times)
        self.outputs: dict[int, Iterator[int]] = {}
        self.batches: dict[int, ScheduledBatch] = {}
        self.last: list[StepRow] | None = []
        self.ruled: list[Sequence] = []
        """Choices that had a grammar: the replay searches them for forced tokens."""

    def run(self) -> Replayed:
        decisions = rows = 0
        lives = iter(self.log.lives)
        for event in self.log.events:
            match event:
                case Added():
                    self._add(next(lives))
                case Aborted():
                    self.scheduler.abort(event.request_id, event.choice)
                case Filled():
                    self.scheduler.budget.fill_tokens = event.tokens
                case CacheReset():
                    self.scheduler.reset_prefix_cache()
                case TakenBack():
                    self._take_back(event)
                case Planned():
                    difference = self._plan(event)
                    decisions += 1
                    rows += len(self.last or ()) if event.step else 0
                    if difference is not None:
                        return Replayed(decisions, rows, difference)
                case Done() if event.step:
                    self._commit(event)
        return Replayed(decisions, rows, None)

    def _add(self, life: Life) -> None:
        self.scheduler.add(self.script.request(life))
        first = self.scheduler.requests[life.added.request_id].leader.seq_id
        if first != life.added.first_seq:
            raise ValueError(f"{DAMAGED}: request {life.added.request_id} is not the next one")
        for choice in range(life.added.n):
            self.outputs[first + choice] = self.script.output(life, choice)
        if life.added.grammar:
            self.ruled += self.scheduler.requests[life.added.request_id].choices

    def _plan(self, event: Planned) -> Difference | None:
        if isinstance(self.scheduler.speculation, RecordedDrafts):
            rows_now = rows_of(event.rows) if event.rows else ()
            self.scheduler.speculation.rows = {seq_id: tokens for seq_id, _, tokens in rows_now}
        batch = self.scheduler.schedule()
        step = 0 if batch is None else batch.step
        rows = [] if batch is None else [(row.seq_id, row.start, row.num_tokens) for row in batch.rows]
        if event.step:
            self.last = last_rows_on(self.last) if event.rows is None else rows_of(event.rows)
        if batch is not None:
            self.batches[step] = batch
        scheduler = self.scheduler
        copies = 0 if batch is None else len(batch.block_copies)
        now = (step, rows, copies, scheduler.held_back, len(scheduler.waiting), len(scheduler.running))
        then = (
            event.step,
            self.last if event.step else [],
            event.copies,
            event.held_back,
            event.waiting,
            event.running,
        )
        if now == then and scheduler.cache.num_free == event.free_blocks:
            return None
        return Difference(
            event.step, f"{then}, {event.free_blocks} free blocks", f"{now}, {scheduler.cache.num_free} free blocks"
        )

    def _take_back(self, event: TakenBack) -> None:
        if event.partly:
            raise ValueError(f"the engine itself failed here ({event.reason}), so this log cannot be run again")
        self.batches.clear()
        self.scheduler.take_back(event.reason)
        self._watch_grammars()

    def _commit(self, event: Done) -> None:
        if event.step not in self.batches:
            raise ValueError(f"{DAMAGED}: step {event.step} ended without having been planned")
        batch = self.batches.pop(event.step)
        if event.learned:
            self.scheduler.times.learn(StepLoad.of(batch.spans(), batch.scored), event.learned)
        result = StepResult({})
        jumps = dict(event.jumps)
        self.scheduler.jumps.forced = lambda seq, token, least, most: [  # type: ignore[method-assign]
            next(self.outputs[seq.seq_id]) for _ in range(jumps.get(seq.seq_id, 0))
        ]
        for seq_id, sound in event.errors:
            result.errors[seq_id] = "recorded error"
            if sound:
                result.sound.add(seq_id)
        refused = {seq for seq, reason, _, _ in event.ended if reason == "error"} - set(result.errors)
        accepted = dict(event.accepted)
        for row in batch.rows:
            for draw in row.draws:
                count = accepted.get(draw.seq_id, 0)
                if row.drafts:  # its answer may have ended among them
                    left = list(islice(self.outputs[draw.seq_id], count + (draw.seq_id not in result.errors)))
                    result.accepted[draw.seq_id] = left[:count]
                    if len(left) > count:
                        result.tokens[draw.seq_id] = left[count]
                else:
                    void = self.scheduler.jumps.is_void(draw.seq_id, batch.step)
                    result.tokens[draw.seq_id] = 0 if void else next(self.outputs[draw.seq_id])
                if draw.seq_id in refused:  # by its grammar: the model did nothing wrong
                    result.errors[draw.seq_id] = "recorded error"
                    result.sound.add(draw.seq_id)
        for row in batch.rows:
            if row.prompt_logprobs is not None:
                result.prompt_logprobs[row.seq_id] = ()
        self.scheduler.commit(batch, result)
        self._watch_grammars()

    def _watch_grammars(self) -> None:
        self.ruled = [choice for choice in self.ruled if choice.finish_reason is None]
        for choice in self.ruled:
            choice.plain = False
