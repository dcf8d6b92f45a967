"""Keep the state of all requests of an engine: add and end them, and apply the tokens that a step drew.

``Scheduler`` adds the planning of steps. Outputs of a step come in the order of its rows. A choice ends at a stop
token, at its length, when its grammar is complete, or with an error of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...costs.learning import StepTimes
from ...costs.steps import StepLoad
from .arrivals import Arrivals, max_length
from .batch import Clock, ScheduledBatch, ScheduledRow, StepResult
from .drafters.registry import SpeculativeConfig
from .jump_ahead import JumpAhead
from .kv_cache import KVCache
from .outputs import EngineOutput, SchedulerStats
from .policies.admission import Admission
from .policies.budget import StepBudget
from .policies.model_speculation import speculation_of
from .policies.speculation import Speculation
from .request import Request, RequestState, Sequence, Status
from .scheduler_config import SchedulerConfig
from .sequence_blocks import SequenceBlocks
from .waiting_queue import WaitingQueue


class Bookkeeping:
    """Bookkeeping of all requests of an engine. Not thread-safe: one loop owns it.

    Args:
        config: limits and policies.
        clock: for the requests' times.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.cache = KVCache(config.num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        self.blocks = SequenceBlocks(self.cache, config.block_size)
        self.waiting = WaitingQueue(Admission(config.max_queue, config.max_queue_bytes, config.max_queue_wait))
        self.running: list[Sequence] = []
        """Sequences with blocks, best rank first."""
        self.times = StepTimes()
        """Learned step times; the engine loop updates them after each step."""
        self.budget = StepBudget(config, self.times)
        self.speculation: Speculation | None = None
        if config.speculation is not None:
            assert isinstance(config.speculation, SpeculativeConfig)
            self.speculation = speculation_of(config.speculation, self.times)
        self.held_back = ""
        """Reason that the last step did not admit the queue's head, see ``decisions.py``; empty if no request waits."""
        self.ended: list[Sequence] | None = None
        """If set, finished choices are appended to this list."""
        self._cut = False
        """True if the last step left a prompt unfinished."""
        self._static = config.batching == "static"
        self._watermark = int(config.watermark * config.num_blocks)
        self.arrivals = Arrivals(config)
        self.requests: dict[str, RequestState] = {}
        """Requests with an unfinished choice, by id."""
        self._places = 0
        """Number of the ``max_num_seqs`` places in use."""
        self._in_flight: deque[tuple[ScheduledBatch, list[Sequence]]] = deque()
        self.committing: list[EngineOutput] | None = None
        """Outputs made so far from the result being committed; None between two commits."""
        self._advancing: Sequence | None = None
        """Choice whose token is being committed."""
        self._step = 0
        self.jumps = JumpAhead(config.jump_ahead)
        self._last: deque[list[Sequence]] = deque(maxlen=config.pipeline_depth)
        """Sequences of the last steps' rows, oldest step first: in a pipeline the same sequences decode in turns."""
        self.drafting = False
        """True if the newest step has drafts: lengths are not known until it is done."""
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    # Requests in and out

    @property
    def has_unfinished(self) -> bool:
        """True while a choice of any request has not ended."""
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request. A request that is carried over (``Request``) was admitted elsewhere: its sequences
        wait like preempted ones, and ``max_queue`` does not count it.

        Raises:
            ValueError: it can never fit, or its id is in use; the message has the numbers.
            QueueFull: the queue is at one of its bounds.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; choose another")
        longest = max_length(request, self.config)
        if not request.carried_over and request.request_id not in self.waiting.let_in:
            self.check_room(request, longest)
        now = self.clock.now()
        state = self.arrivals.state(request, longest, now)
        self.requests[request.request_id] = state
        for seq in state.begin(now):
            seq.cached = len(self.blocks.find_prefix(seq)) * self.config.block_size
            self.waiting.push(seq)

    def check_room(self, request: Request, longest: int) -> None:
        """Raise QueueFull if the queue cannot take the request now.

        Args:
            longest: ``arrivals.max_length`` of the request.
        """
        self.waiting.check_room(*self.arrivals.claim(request, longest))

    def abort(self, request_id: str, choice: int | None = None) -> list[EngineOutput]:
        """End a request, or one choice of it, at any moment. Returns the last output of each choice that this ends;
        nothing for choices or requests that have already ended. KV blocks are freed now, or when the step in flight is
        done."""
        state = self.requests.get(request_id)
        if state is None:
            return []
        targets = [seq for seq in state.choices if choice is None or seq.index == choice]
        return [self._end(seq, "abort") for seq in targets if seq.finish_reason is None]

    def _places_of(self, seq: Sequence) -> int:
        return 1 if seq.request.prompt_done else seq.request.spec.params.n

    # What a step's tokens change

    def commit(self, batch: ScheduledBatch, result: StepResult) -> list[EngineOutput]:
        """Commit the result of the oldest batch in flight. Returns the new outputs of its choices."""
        oldest, sequences = self._in_flight.popleft()
        assert oldest is batch, f"step {batch.step} was committed out of order, step {oldest.step} is older"
        outputs: list[EngineOutput] = []
        self.committing = outputs
        self.blocks.step_done(batch.step)
        now, block_size = self.clock.now(), self.config.block_size
        tokens, errors = result.tokens, result.errors
        for row, seq in zip(batch.rows, sequences, strict=True):
            end = row.start + row.num_tokens
            if row.drafts:
                outputs += self._take_drafts(row, seq, result, now)
                continue
            if (
                seq.plain
                and not errors
                and row.draws
                and end + 1 < seq.max_length
                and end // block_size == seq.num_registered
                and seq.finish_reason is None
                and (token := tokens[seq.seq_id]) not in seq.stop_ids
            ):  # what most rows of most steps are: a token, and nothing to be done about it
                seq.output_token_ids.append(token)
                self._generation_tokens += 1
                outputs.append(EngineOutput(seq.request_id, seq.index, [token], num_cached_tokens=seq.num_cached))
                continue
            failed = failures(row, seq, errors, self._is_void(batch, result)) if errors else []
            if any(choice.seq_id not in result.sound for choice, _ in failed):
                self.blocks.distrust(row.block_ids)  # a preempted sequence holds none any more
                for choice in (seq, *(choice for choice, _ in failed)):
                    self.blocks.distrust(choice.block_ids)
            elif seq.status is Status.RUNNING and end // block_size > seq.num_registered:
                self.blocks.register(seq, end)
            for choice, error in failed:
                outputs.append(self._end(choice, "error", error))
            state = seq.request
            if row.prompt_logprobs is not None or row.pooling is not None:
                state.take_prompt(row, result)
            for draw in row.draws:
                choice = seq if draw.seq_id == seq.seq_id else state.choices[draw.choice]
                if choice.constraint is not None and self.jumps.is_void(draw.seq_id, batch.step):
                    self.jumps.drop(draw.seq_id)
                elif choice.finish_reason is None:
                    self._advancing = choice
                    outputs += self._advance(choice, result, now)
        self.committing = self._advancing = None
        return outputs

    def take_back(self, reason: str) -> list[EngineOutput]:
        """Discard all steps in flight and all KV, because the executor or ``commit`` has raised. Unfinished sequences
        wait with their known tokens, and recompute them; draws depend on positions, so the next tokens are the same. A
        ``commit`` that raised may have left one choice half changed: it ends with the error ``reason``.

        Call it before anything else after such an exception; calling it again does no harm. The executor must be done
        with all steps. Returns the outputs that the ``commit`` had made, and the last one of a choice ended here.
        """
        outputs, unclear = self.committing or [], self._advancing
        self.committing = self._advancing = None
        self._places, self._cut, self.held_back = 0, False, ""
        self.running.clear()
        self._in_flight.clear()
        self._last.clear()
        self.drafting = False
        if self.speculation is not None:
            self.speculation.abandon()
        self.waiting.reset()
        self.jumps.reset()
        self.blocks.reset(self._step)
        for state in self.requests.values():
            for seq in state.restart():
                self.waiting.push(seq)
        told = unclear is None or any((o.request_id, o.index) == (unclear.request_id, unclear.index) for o in outputs)
        if unclear is not None and not told and unclear.finish_reason is None:
            outputs.append(self._end(unclear, "error", reason))
        return outputs

    def _is_void(self, batch: ScheduledBatch, result: StepResult) -> Callable[[int], bool]:
        """Return a test for seq_ids whose errors are to be ignored, because the token of the draw is known already."""
        return lambda seq_id: seq_id in result.sound and self.jumps.is_void(seq_id, batch.step)

    def _take_drafts(self, row: ScheduledRow, seq: Sequence, result: StepResult, now: float) -> list[EngineOutput]:
        """Append the accepted drafts of a row, and the draw after them."""
        assert self.speculation is not None
        accepted = len(result.accepted.get(seq.seq_id, ()))
        self.speculation.verified(seq.seq_id, len(row.drafts), accepted)
        error = result.errors.get(seq.seq_id)
        if error is not None and seq.seq_id not in result.sound:
            self.blocks.distrust(seq.block_ids)
        if seq.finish_reason is not None:
            return []
        running = seq.status is Status.RUNNING  # in a pipeline it may have been preempted meanwhile
        seq.scheduled += accepted if running else 0
        seq.length += accepted
        self.waiting.grew(seq, accepted)
        if running:
            self.blocks.register(seq, row.known_end)
        self._advancing = seq
        outputs = self._advance(seq, result, now)
        if seq.finish_reason is not None:
            return outputs
        if error is not None:
            return [*outputs, self._end(seq, "error", error)]
        if running:
            self.blocks.register(seq, row.known_end + accepted)
        return outputs

    def _advance(self, choice: Sequence, result: StepResult, now: float) -> list[EngineOutput]:
        """Append the tokens that a step drew for ``choice`` (one unless drafts were accepted), and check whether one is
        the last."""
        state, wants_logprobs = choice.request, choice.request.spec.params.logprobs is not None
        drawn = list(result.accepted.get(choice.seq_id, ()))
        if choice.seq_id in result.tokens:
            drawn.append(result.tokens[choice.seq_id])
        output = EngineOutput(state.spec.request_id, choice.index, [], num_cached_tokens=state.num_cached_tokens)
        problem = None
        for token in drawn:
            if choice.constraint is not None and (problem := choice.constraint.accept(token)) is not None:
                break
            choice.output_token_ids.append(token)
            output.new_token_ids.append(token)
            if choice.constraint is not None and len(output.new_token_ids) == len(drawn):
                planned = choice.length
                output.new_token_ids += self.jumps.jump(choice, token)
                self.waiting.grew(choice, choice.length - planned)
            reason = self._reason_to_end(choice, output)
            if reason is not None:
                self._finish(choice, reason)
                break
        new = len(output.new_token_ids)
        self._generation_tokens += new
        if wants_logprobs and new:
            last = [result.logprobs[choice.seq_id]] if choice.seq_id in result.logprobs else []
            output.logprobs = [*result.accepted_logprobs.get(choice.seq_id, []), *last][:new]
        if choice.first_token_time is None and new:
            choice.first_token_time = now
            output.times = state.times(choice, None)
            state.give_prompt(output)
            choice.plain = not wants_logprobs and choice.constraint is None
            choice.num_cached = state.num_cached_tokens
        if choice.finish_reason is not None:
            output.finish_reason = choice.finish_reason
            output.times = state.times(choice, now)
        outputs = [output] if new else []
        return outputs if problem is None else [*outputs, self._end(choice, "error", problem)]

    def _reason_to_end(self, choice: Sequence, output: EngineOutput) -> str | None:
        """Return "stop" or "length" if the newest token of ``choice`` is its last, and record the stop in
        ``output``."""
        state, token = choice.request, choice.output_token_ids[-1]
        length = choice.prompt_len + len(choice.output_token_ids)
        if token in state.stop_ids and length > choice.draws[0].min_position:
            output.stop_reason = None if token in state.eos else token
            return "stop"
        if choice.constraint is not None and choice.constraint.terminated:
            output.complete = True
            return "stop"
        return "length" if length == choice.max_length else None

    def _end(self, choice: Sequence, reason: str, error: str | None = None) -> EngineOutput:
        """End a choice without another token; returns its last output."""
        self._finish(choice, reason)
        state = choice.request
        return EngineOutput(
            state.spec.request_id,
            choice.index,
            [],
            finish_reason=reason,
            num_cached_tokens=state.num_cached_tokens,
            error=error,
            times=state.times(choice, self.clock.now()),
        )

    def _finish(self, choice: Sequence, reason: str) -> None:
        state = choice.request
        choice.finish_reason = reason
        if self.ended is not None:
            self.ended.append(choice)
        if self.speculation is not None:
            self.speculation.ended(choice)
        self._finished[reason] += 1
        state.num_live -= 1
        if choice is not state.leader or state.prompt_done or not state.num_live:
            self._leave(choice)
        if not state.num_live:
            del self.requests[state.spec.request_id]
            self.arrivals.order.ended(state.turn, state.computed_tokens)
            if not state.spec.in_one_piece:
                self.budget.recent.ended(state.spec.client, max(each.last_step for each in state.choices))
            if not self.requests:
                self.arrivals.order.reset()
            if state.leader.status is not Status.GONE:
                self._leave(state.leader)

    def _leave(self, seq: Sequence) -> None:
        """Remove a sequence from the lists, and free its blocks."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._places -= self._places_of(seq)
            self.blocks.release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.GONE

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests keep their KV."""
        self.cache.clear()
        if self.speculation is not None:
            self.speculation.clear_cache()

    def decode_seconds(self) -> tuple[float, float]:
        """Predict the seconds of a step that decodes the running sequences, and those that one more sequence of their
        mean length adds; zeros before step times are learned."""
        rows, keys = len(self.running), sum(seq.length for seq in self.running)
        more = rows + 1, keys + keys // max(1, rows)
        with_one = self.times.predict(StepLoad(more[0], more[1], 0, more[0], 0, more[0]))
        step = self.times.predict(StepLoad(rows, keys, 0, rows, 0, rows)) if rows else 0.0
        return min(step, with_one), max(with_one - step, 0.0)

    def stats(self) -> SchedulerStats:
        """Return gauges of this moment and counters since the start."""
        step, row = self.decode_seconds()
        return SchedulerStats(
            waiting=self.waiting.num_new,
            preempted=self.waiting.num_preempted,
            running=len(self.running),
            kv_blocks_total=self.config.num_blocks,
            kv_blocks_used=self.config.num_blocks - self.cache.num_free,
            kv_blocks_cached=self.cache.num_cached,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            jumped_tokens=self.jumps.taken,
            steps=self._step,
            timed_steps=self.times.steps,
            step_seconds=self.times.measured,
            predicted_step_seconds=self.times.predicted,
            finished=dict(self._finished),
            kv_evictions=self.cache.evictions,
            next_step_seconds=step,
            next_row_seconds=row,
            **({} if self.speculation is None else self.speculation.counts()),
        )


def failures(
    row: ScheduledRow, seq: Sequence, errors: dict[int, str], ignored: Callable[[int], bool] = lambda seq_id: False
) -> list[tuple[Sequence, str]]:
    """Return the running choices that the errors of a step end, each with its message, as far as they concern ``row``.

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
