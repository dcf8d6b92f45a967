"""Schedule requests by continuous batching: plan the next step, and apply the tokens that it draws.

Every step is one ragged batch under a budget of tokens. The budget is smaller if sequences decode, because they wait
for the whole step (``policies/budget``). Sequences that hold KV blocks are served in the order of their ranks
(``policies/order``: shares of clients, priority, arrival; with ``longest_first`` those with the most tokens to draw
come first). Each is guaranteed one token of the budget. The rest of the budget goes to the prompts, again by rank, and
cuts them into chunks (Sarathi-Serve, Agrawal et al. 2024). So decodes never wait behind prompts, and prompts always
progress. Then the queue's head is admitted while there are places, budget and KV blocks for all its tokens. No request
overtakes the head, so every request is served eventually (with ``longest_first``: once no longer ones arrive). One
exception: if prompts of its length have used their share of the step, others go first, as long as places and blocks for
the head are left (backfilling, Lifka 1995).

When a sequence needs a block and none is free, the running sequence of the worst rank is preempted: it returns its
blocks, keeps its output tokens, and recomputes prompt and output at its next turn. Draws depend on positions, not on
steps, so its tokens are the same as without preemption. The sequence of the best rank is never preempted by others, and
any one alone fits into the pool (``add`` has checked it), so there is always progress.

A request with n choices computes its prompt once, by its leader (choice 0). With the prompt's last chunk all choices
draw their first tokens, and fork: they share the prompt's blocks, and copy the last, partly filled one before they
write into it. If choice 0 is aborted earlier, its sequence still computes the rest of the prompt for the others.

Steps may be planned before the tokens of the step before are known (``EngineCore`` with lag 1). Lengths are known even
then, so ``max_tokens`` and the context length need no care; a stop token found late makes the step in flight void for
that sequence.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from ...costs.learning import StepTimes
from . import limits
from .arrivals import Arrivals
from .batch import Clock, Draw, ScheduledBatch, ScheduledRow, StepResult
from .drafters.registry import SpeculativeConfig
from .failures import failures
from .jump_ahead import JumpAhead
from .kv_cache import KVCache
from .outputs import EngineOutput, SchedulerStats
from .plan import Plan
from .policies.admission import Admission
from .policies.budget import Coming, StepBudget
from .policies.places import LOOKED_AT, exchange
from .policies.speculation import Speculation
from .request import Request, RequestState, Sequence, Status
from .scheduler_config import SchedulerConfig
from .sequence_blocks import SequenceBlocks
from .waiting_queue import WaitingQueue

_by_rank = attrgetter("rank")

BEHIND = 2**32
"""Added to the choice in a rank: behind all choices of that request. Taken from it: before them."""
BARRED = ("kv", "places")
"""Reasons that hold back the queue's head however large the step is."""


class Scheduler:
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
            self.speculation = Speculation(config.speculation, self.times)
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
        """The outputs made so far of the result that is being taken in; None between two of them."""
        self._advancing: Sequence | None = None
        """The choice whose token is being taken in."""
        self._step = 0
        self.jumps = JumpAhead(config.jump_ahead)
        self._last: deque[list[Sequence]] = deque(maxlen=config.pipeline_depth)
        """The sequences of the last steps' rows, the oldest first: in a pipeline the same decode in turns."""
        self.drafting = False
        """The newest step has drafts: lengths are not known until it is done."""
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
        """Queue a request. One that is continued (``Request.output_token_ids``) has been admitted before, elsewhere:
        its sequences wait as preempted ones do, and ``max_queue`` does not count it.

        Raises:
            ValueError: it can never fit, or its id is in use; the message has the numbers.
            QueueFull: the queue is at one of its bounds.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; choose another")
        max_length = limits.max_length(request, self.config)
        if request.output_token_ids is None and request.request_id not in self.waiting.let_in:
            self.check_room(request, max_length)
        now = self.clock.now()
        state = self.arrivals.state(request, max_length, now)
        self.requests[request.request_id] = state
        for seq in state.begin(now):
            seq.cached = len(self.blocks.find_prefix(seq)) * self.config.block_size
            self.waiting.push(seq)

    def check_room(self, request: Request, max_length: int) -> None:
        """Raises QueueFull where the queue takes no such request now.

        Args:
            max_length: see ``limits.max_length``.
        """
        self.waiting.check_room(*self.arrivals.claim(request, max_length))

    def abort(self, request_id: str, choice: int | None = None) -> list[EngineOutput]:
        """End a request, or one choice of it, at any moment. Returns the last output of each choice that this ends;
        nothing for choices or requests that have ended before. KV blocks come back now, or when the step in flight is
        done."""
        state = self.requests.get(request_id)
        if state is None:
            return []
        targets = [seq for seq in state.choices if choice is None or seq.index == choice]
        return [self._end(seq, "abort") for seq in targets if seq.finish_reason is None]

    # Planning a step

    def coming(self) -> Coming:
        """Return the facts of the next step if it were planned now."""
        return self.budget.coming(self.running, self.waiting, self._cut, self.held_back in BARRED)

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step; None when nothing can run now (no work, or all wait for the step in flight). Each batch
        must come back through ``commit``, in order."""
        block_size = self.config.block_size
        running, depth = self.running, self.config.pipeline_depth
        if self.held_back == "places" and self.arrivals.order.shared:
            self._yield_places()
        most = -(-len(running) // depth)
        budget = self.budget.of_next(running, self.waiting, self._cut, self.held_back in BARRED)
        spare = budget.tokens - len(running)
        plan = Plan(self._step + 1, budget)
        step, rows, sequences = plan.step, plan.rows, plan.sequences
        drafts = self._draft(spare) if self.speculation is not None and spare > 0 else None
        again = True  # as long as all rows are of the kind that most are
        starved = False
        for seq in running:  # preemption takes sequences from the end of this list while it is walked
            length = seq.length
            if length == seq.max_length:  # its last token is being drawn
                spare += 1
                continue
            if depth > 1:
                if len(rows) >= most or length > seq.prompt_len + len(seq.output_token_ids):
                    spare += 1  # it is in a step under way, or its turn is the next one's
                    continue
                again = again and seq.last_step == step - depth  # it may have had a turn since
            take = length - seq.scheduled
            if (
                take == 1
                and seq.request.prompt_done
                and seq.shared_block is None
                and (length <= len(seq.block_ids) * block_size or self.blocks.grow(seq))
            ):  # what _plan_row would do, for what most rows of most steps are
                prompt, output = seq.prompt_token_ids, seq.output_token_ids
                if drafts and (tokens := drafts.get(seq.seq_id)) and (tokens := self._fit(seq, tokens)):
                    count = 1 + len(tokens)
                    spare, again = spare - len(tokens), False
                    rows.append(
                        ScheduledRow(
                            seq.seq_id, length - 1, count, prompt, output, seq.block_ids, seq.draws, drafts=tokens
                        )
                    )
                else:
                    rows.append(ScheduledRow(seq.seq_id, length - 1, 1, prompt, output, seq.block_ids, seq.draws))
                sequences.append(seq)
                seq.scheduled = length
                seq.length = length + 1
                seq.last_step = step
                continue
            again = False
            if take > 1:
                take = plan.take(take, 1 + spare)
                spare -= take - 1
            end = seq.scheduled + take
            if (seq.shared_block is not None or end > len(seq.block_ids) * block_size) and not self._make_room(
                seq, end, plan
            ):
                starved = True
                room = len(seq.block_ids) * block_size
                if seq.shared_block is not None or room <= seq.scheduled:
                    spare += take
                    continue
                spare, end = spare + end - room, room  # a copy planned for it would be lost with an empty step
            self._plan_row(seq, end, plan)
        self.held_back = ""
        decoding = len(rows)
        if not starved:
            self._admit(spare, plan)
        if len(self.waiting) and not self.held_back:
            self.held_back = "kv" if starved else "budget"
        for seq in plan.forks:
            insort(running, seq, key=_by_rank)
            leader = seq.request.leader
            if leader.finish_reason is not None and leader.status is Status.RUNNING:
                self._leave(leader)  # it was aborted, and went on to the end of the prompt for the others
        if not rows:
            self._last.clear()
            return None
        self._step = step
        again = again and len(rows) == decoding and len(self._last) == depth and sequences == self._last[0]
        batch = ScheduledBatch(step, tuple(rows), tuple(plan.copies), again)
        self._cut = not batch.again and not all(row.draws for row in rows)
        self.drafting = not batch.again and any(row.drafts for row in rows)
        if self.drafting:
            self._last.clear()  # rows of the next step do not start where these end
        else:
            self._last.append(sequences)
        self.budget.planned(not batch.again and any(row.num_tokens - len(row.drafts) > 1 for row in rows))
        self._in_flight.append((batch, sequences))
        return batch

    @property
    def waits_for_tokens(self) -> bool:
        """Drafts are in flight or would pay: the next step is planned when all tokens before it are known."""
        return self.drafting or (self.speculation is not None and self.speculation.worthwhile)

    def _draft(self, spare: int) -> dict[int, tuple[int, ...]]:
        """Drafts by seq_id for the next step, at most ``spare`` tokens in all; none while tokens are in flight."""
        assert self.speculation is not None
        decoding, others, all_known = [], 0, True
        for seq in self.running:
            take = seq.length - seq.scheduled
            if take == 1 and seq.request.prompt_done and seq.shared_block is None:
                if seq.length < seq.max_length:
                    decoding.append(seq)
                    all_known = all_known and seq.length == seq.prompt_len + len(seq.output_token_ids)
            elif seq.length < seq.max_length:
                others += take
        if not decoding or others or len(self.waiting):  # prompts fill steps to their best size already
            self.speculation.worthwhile = False
            return {}
        found = self.speculation.drafts(decoding, min(spare, self.config.max_num_seqs - len(decoding)))
        return found if all_known else {}

    def _fit(self, seq: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The leading ``drafts`` for which ``seq`` has KV blocks, or gets some without preemption."""
        size = self.config.block_size
        while seq.length + len(drafts) > len(seq.block_ids) * size and self.blocks.grow(seq):
            pass
        return drafts[: len(seq.block_ids) * size - seq.length]

    def _plan_row(self, seq: Sequence, end: int, plan: Plan) -> None:
        """Let the step compute ``seq`` up to position ``end``, and draw when that completes it."""
        state = seq.request
        spec = state.spec
        start = seq.scheduled
        seq.scheduled = end
        seq.last_step = plan.step
        asked = (None, None) if state.prompt_done else (spec.params.prompt_logprobs, spec.pooling)
        block_ids = seq.block_ids
        draws: tuple[Draw, ...] = ()
        if end == seq.length:
            draws = seq.draws if state.prompt_done else self._complete_prompt(seq, plan)
            seq.length = end + 1
        plan.rows.append(
            ScheduledRow(
                seq.seq_id, start, end - start, seq.prompt_token_ids, seq.output_token_ids, block_ids, draws, *asked
            )
        )
        plan.sequences.append(seq)

    def _complete_prompt(self, leader: Sequence, plan: Plan) -> tuple[Draw, ...]:
        """The leader's last prompt chunk is planned: fork. Returns the draws of the choices that are alive."""
        state = leader.request
        self._places -= self._places_of(leader)
        state.prompt_done = True
        alive = [choice for choice in state.choices if choice.finish_reason is None]
        partial, rest = divmod(leader.scheduled, self.config.block_size)
        for choice in alive:
            if choice is not leader:
                self.blocks.fork(leader, choice)
                choice.status = Status.RUNNING
                choice.length = leader.scheduled + 1
                choice.last_step = plan.step
                plan.forks.append(choice)
            if rest and len(alive) > 1:
                choice.shared_block = partial
        self._places += len(alive) + (leader.finish_reason is not None)
        return tuple(choice.draws[0] for choice in alive)

    def _make_room(self, seq: Sequence, end: int, plan: Plan) -> bool:
        """See to it that ``seq`` has its own blocks for writing up to position ``end``, by preemption if need be. False
        when it cannot run in this step: it was preempted itself, or the blocks come with the step in flight."""
        while True:
            if seq.shared_block is not None:
                if self.blocks.owns_shared_block(seq):
                    seq.shared_block = None
                    continue
                copy = self.blocks.copy_shared_block(seq, plan.step)
                if copy is not None:
                    plan.copies.append(copy)
                    continue
            elif end <= len(seq.block_ids) * self.config.block_size:
                return True
            elif self.blocks.grow(seq):
                continue
            if self.blocks.returns_pending:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False

    def _yield_places(self) -> None:
        """Let clients below their share of places have some of clients above (``policies/places``). The next sequence
        that gets one comes to the head of the queue, and the one that loses its place waits right behind."""
        most, front = self.config.max_num_seqs, self.waiting.in_order()[:LOOKED_AT]
        found = exchange(self.running, front, self._places_of, most)
        if found is None:
            return
        newcomer, loser = found
        if newcomer is not front[0]:
            self.waiting.move(newcomer, (*front[0].rank[:4], newcomer.seq_id - BEHIND))
        while self._places + self._places_of(newcomer) > most:
            loser.rank = (*newcomer.rank[:4], BEHIND + loser.seq_id)
            self._preempt(loser)
            found = exchange(self.running, front, self._places_of, most)
            if found is None or found[0] is not newcomer:
                return
            loser = found[1]

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence; it queues up to be computed anew."""
        self.running.remove(seq)
        self._places -= self._places_of(seq)
        self.blocks.release(seq)
        self._last.clear()  # when it comes back, its blocks are others
        seq.cached = 0
        self.waiting.push(seq)
        self._preemptions += 1

    def _admit(self, spare: int, plan: Plan) -> None:
        """Admit from the head of the queue what ``spare`` tokens, the places and the KV blocks allow."""
        if self._static:
            self._admit_static(spare, plan)
            return
        most, graph = self.config.graph_prompts, self.config.graph_tokens or 0
        prompts, tokens = plan.sizes() if most is not None and len(self.waiting) else (0, 0)
        passed: Sequence | None = None
        for seq in self.waiting.in_order() if plan.shares else iter(self.waiting.head, None):
            if spare <= 0 or (most is not None and prompts >= most and tokens <= graph):
                break
            if not plan.allows(seq.to_compute):  # its like have taken their share: it is not held up by shorter ones
                passed = passed or seq
                continue
            used = self._try_admit(seq, spare, plan, passed)
            if used is None:
                break
            spare, prompts, tokens = spare - used, prompts + (used > 1), tokens + used

    def _admit_static(self, spare: int, plan: Plan) -> None:
        """Admit preempted members of the present batch; when all have ended, the next batch."""
        fresh = not (self.running or self.waiting.num_preempted or self.blocks.returns_pending)
        reserved = 0
        while (seq := self.waiting.head()) is not None:
            if seq.request.first_scheduled is None:
                reserved += limits.most_blocks(seq.request.spec, self.config)
                if not fresh or (self.running and reserved > self.config.num_blocks):
                    self.held_back = "batch"
                    break
            used = self._try_admit(seq, spare, plan)
            if used is None:
                break
            spare -= used

    def _try_admit(self, seq: Sequence, spare: int, plan: Plan, passed: Sequence | None = None) -> int | None:
        """Admit ``seq``, if it can be, and plan its first tokens, at most ``spare``. Returns their number. ``passed``:
        the queue's head, where ``seq`` goes before it."""
        blocks, state = self.blocks, seq.request
        if seq.last_step > blocks.committed_step:  # preempted while a step of it is in flight
            self.held_back = "flight"
            return None
        others = self._places + (0 if passed is None else self._places_of(passed))
        if others + self._places_of(seq) > self.config.max_num_seqs:
            self.held_back = "places"
            return None
        computes_all = not state.prompt_done and state.spec.whole_prompt
        cached = blocks.find_prefix(seq)
        needed = blocks.blocks_for(seq.length) - len(cached) + self.cache.count_unused(cached)
        needed += 0 if passed is None else blocks.blocks_for(passed.length)
        if needed + (self._watermark if self.running else 0) > self.cache.num_free:
            self.held_back = "kv"
            return None
        self.waiting.admit(seq, self.clock.now())
        blocks.place(seq, cached)
        self._places += self._places_of(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=_by_rank)
        if state.first_scheduled is None:
            self.arrivals.order.admitted(state.turn)
            state.first_scheduled = self.clock.now()
            state.num_cached_tokens = seq.scheduled
            self._prompt_tokens += seq.prompt_len
            if self.config.enable_prefix_caching and not computes_all:
                self._prefix_query_tokens += seq.prompt_len
                self._prefix_hit_tokens += seq.scheduled
        take = plan.take(seq.length - seq.scheduled, spare) if spare > 0 else 0
        if take:
            self._plan_row(seq, seq.scheduled + take, plan)
        return take

    def _places_of(self, seq: Sequence) -> int:
        return 1 if seq.request.prompt_done else seq.request.spec.params.n

    # What a step's tokens change

    def commit(self, batch: ScheduledBatch, result: StepResult) -> list[EngineOutput]:
        """Take in the result of the oldest batch in flight. Returns what is new for each choice that it concerns."""
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
                if self.jumps.is_void(draw.seq_id, batch.step):
                    self.jumps.drop(draw.seq_id)
                elif choice.finish_reason is None:
                    self._advancing = choice
                    outputs += self._advance(choice, result, now)
        self.committing = self._advancing = None
        return outputs

    def take_back(self, reason: str) -> list[EngineOutput]:
        """Forget all steps in flight and all KV, because the executor or ``commit`` has raised. Unfinished sequences
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
        self.waiting.reset()
        self.jumps.reset()
        self.blocks.reset(self._step)
        for state in self.requests.values():
            for seq in state.begin_anew():
                self.waiting.push(seq)
        told = unclear is None or any((o.request_id, o.index) == (unclear.request_id, unclear.index) for o in outputs)
        if unclear is not None and not told and unclear.finish_reason is None:
            outputs.append(self._end(unclear, "error", reason))
        return outputs

    def _is_void(self, batch: ScheduledBatch, result: StepResult) -> Callable[[int], bool]:
        """Tells seq_ids whose errors mean nothing: of a draw whose token is known already."""
        return lambda seq_id: seq_id in result.sound and self.jumps.is_void(seq_id, batch.step)

    def _take_drafts(self, row: ScheduledRow, seq: Sequence, result: StepResult, now: float) -> list[EngineOutput]:
        """The accepted drafts of a row, and the draw after them."""
        assert self.speculation is not None
        accepted = len(result.accepted.get(seq.seq_id, ()))
        self.speculation.verified(seq.seq_id, len(row.drafts), accepted)
        error = result.errors.get(seq.seq_id)
        if error is not None and seq.seq_id not in result.sound:
            self.blocks.distrust(seq.block_ids)
        if seq.finish_reason is not None:
            return []
        seq.scheduled += accepted
        seq.length += accepted
        self.blocks.register(seq, row.known_end)
        self._advancing = seq
        outputs = self._advance(seq, result, now)
        if seq.finish_reason is not None:
            return outputs
        if error is not None:
            return [*outputs, self._end(seq, "error", error)]
        self.blocks.register(seq, row.known_end + accepted)
        return outputs

    def _advance(self, choice: Sequence, result: StepResult, now: float) -> list[EngineOutput]:
        """Append the tokens that a step drew for ``choice``, one unless drafts were accepted, and see whether one is
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
            if len(output.new_token_ids) == len(drawn):
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
        """Return "stop" or "length" if the newest token of ``choice`` is its last, and say in ``output`` which stop."""
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
        """End a choice without another token; its last output."""
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
            if not self.requests:
                self.arrivals.order.reset()
            if state.leader.status is not Status.GONE:
                self._leave(state.leader)

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of the lists, and give its blocks back."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._places -= self._places_of(seq)
            self.blocks.release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.GONE

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished prompts; requests that run keep theirs."""
        self.cache.clear()

    def stats(self) -> SchedulerStats:
        """Gauges of this moment and counters since the start."""
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
            **({} if self.speculation is None else self.speculation.counts()),
        )
