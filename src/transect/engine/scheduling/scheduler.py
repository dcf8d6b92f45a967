"""Schedule requests by continuous batching: plan the next step. ``bookkeeping`` applies the tokens that it draws.

Every step is one ragged batch under a budget of tokens. The budget is smaller if sequences decode, because they wait
for the whole step (``policies/budget``). Sequences that hold KV blocks are served in the order of their ranks
(``policies/order``: shares of clients, priority, arrival; with ``longest_first`` those with the most tokens to draw
come first). Each is guaranteed one token of the budget. The rest of the budget goes to the prompts, again by rank, and
cuts them into chunks (Sarathi-Serve, Agrawal et al. 2024). So decodes never wait behind prompts, and prompts always
progress. Then the queue's head is admitted while there are places, budget and KV blocks for all its tokens. No request
overtakes the head, so every request is served eventually (with ``longest_first``: once no longer ones arrive). Two
exceptions: if prompts of its length have used their share of the step, others go first, as long as places and blocks
for the head are left (backfilling, Lifka 1995); and if its client owes time (``policies/turns``), others do.

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
from collections.abc import Callable, Collection
from itertools import islice
from operator import attrgetter

from .arrivals import most_blocks
from .batch import Draw, ScheduledBatch, ScheduledRow
from .bookkeeping import Bookkeeping
from .plan import Plan
from .policies.budget import Coming
from .policies.places import LOOKED_AT, exchange
from .request import Rank, Sequence, Status

_by_rank = attrgetter("rank")

BEHIND = 2**32
"""Offset of the choice in a rank: added, the sequence ranks after all choices of its request; subtracted, before
them."""
BARRED = ("kv", "places", "adapters")
"""Reasons that hold back the queue's head at any step size."""


class Scheduler(Bookkeeping):
    """Plans the steps of an engine, and keeps the state of its requests. Not thread-safe: one loop owns it.

    Args:
        config: limits and policies.
        clock: for the requests' times.
    """

    def coming(self) -> Coming:
        """Return the facts of the next step if it were planned now."""
        barred, state = self.held_back in BARRED, self._state_of_budget()
        return self.budget.coming(self.running, self.waiting, self._cut, barred, state)

    def _state_of_budget(self) -> tuple[int, ...]:
        """Return numbers of which one changes whenever the bounds of the next step may."""
        waiting = self.waiting.changes
        return self._step, self.blocks.committed_step, len(self.running), waiting, self._cut, self.held_back in BARRED

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step; None if nothing can run now (no work, or all sequences wait for the step in flight). Each
        batch must be returned through ``commit``, in order."""
        shared = self.arrivals.order.shared
        if shared and len(self.waiting) and self._share_out():
            self.held_back = ""
        paused = self.budget.rows(self.running, self.waiting).paused if shared else ()
        batch = self._schedule(paused)
        # Sequences whose turn it is may all lack memory.
        return self._schedule((), pause=False) if batch is None and (paused or self._held_prompt) else batch

    def _schedule(self, paused: Collection[int], pause: bool = True) -> ScheduledBatch | None:
        """Plan the next step without the running sequences of ``paused``, by seq_id. ``pause``: prompts may have to
        wait for tokens (``Budget.pause``)."""
        block_size = self.config.block_size
        running, depth = self.running, self.config.pipeline_depth
        most = -(-len(running) // depth)
        active = [seq for seq in running if seq.seq_id not in paused] if paused else running
        state = None if paused else self._state_of_budget()
        budget = self.budget.of_next(active, self.waiting, self._cut, self.held_back in BARRED, state)
        spare = budget.tokens - len(active) + budget.held
        others_wait = len(self.waiting) > 0 and self.arrivals.order.shared and self.held_back not in BARRED
        plan = Plan(self._step + 1, budget)
        step, rows, sequences = plan.step, plan.rows, plan.sequences
        drafts = self._draft(spare, most) if self.speculation is not None and spare > 0 else None
        self._held_prompt = False
        again = True  # as long as all rows are of the kind that most are
        starved = False
        for seq in running:  # preemption takes sequences from the end of this list while it is walked
            if paused and seq.seq_id in paused:
                continue
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
                            seq.seq_id,
                            length - 1,
                            count,
                            prompt,
                            output,
                            seq.block_ids,
                            seq.draws,
                            drafts=tokens,
                            adapter=seq.adapter,
                        )
                    )
                else:
                    row = ScheduledRow(
                        seq.seq_id, length - 1, 1, prompt, output, seq.block_ids, seq.draws, adapter=seq.adapter
                    )
                    rows.append(row)
                sequences.append(seq)
                seq.scheduled = length
                seq.length = length + 1
                seq.last_step = step
                continue
            if pause and take > 1 and (budget.pause or plan.rooms.get(seq.request.spec.client) == 0):
                self._held_prompt = True
                spare += budget.pause
                continue
            again = False
            if take > 1:
                ahead = self._ahead(seq, plan) if others_wait else 0
                take = plan.take(seq, 1 + max(0, spare - ahead))
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
        self._cut = self._held_prompt or (not batch.again and not all(row.draws for row in rows))
        drafting = not batch.again and any(row.drafts for row in rows)
        self.drafting = drafting and depth == 1  # in a pipeline the next steps have other sequences
        if drafting:
            self._last.clear()  # rows of the next step do not start where these end
        else:
            self._last.append(sequences)
        prompts = not batch.again and any(row.num_tokens - len(row.drafts) > 1 for row in rows)
        self.budget.planned(prompts, plan.taken)
        self._in_flight.append((batch, sequences))
        return batch

    def waits_for_tokens(self) -> bool:
        """Return True if the next step is planned after the tokens under way are known: drafts are among them, or are
        expected to pay then."""
        if self.config.pipeline_depth > 1 or not self._in_flight:
            return False
        if self.drafting or self.speculation is None:
            return self.drafting
        if self.speculation.rests(len(self.running)):
            return False
        decoding, known = self._decoding(len(self.running))
        if known or not decoding:
            return False
        self.speculation.drafts(decoding, self.config.max_rows - len(decoding), known=False)
        return self.speculation.worthwhile

    def _draft(self, spare: int, most: int) -> dict[int, tuple[int, ...]]:
        """Return drafts by seq_id for the next step, at most ``spare`` tokens in total; none while tokens are in
        flight. ``most``: rows of a step in a pipeline."""
        assert self.speculation is not None
        decoding, known = self._decoding(most)
        if not decoding or not known or self.speculation.rests(len(self.running)):
            return {}
        return self.speculation.drafts(decoding, min(spare, self.config.max_rows - len(decoding)))

    def _decoding(self, most: int) -> tuple[list[Sequence], bool]:
        """Return the sequences that decode in the next step, and True if all of their tokens are known. There are none
        if prompts wait: those fill steps to their best size already. ``most``: see ``_draft``."""
        decoding: list[Sequence] = []
        others, known, staged = 0, True, self.config.pipeline_depth > 1
        for seq in self.running:
            if staged and (len(decoding) >= most or seq.length > seq.prompt_len + len(seq.output_token_ids)):
                continue
            take = seq.length - seq.scheduled
            if take == 1 and seq.request.prompt_done and seq.shared_block is None:
                if seq.length < seq.max_length:
                    decoding.append(seq)
                    known = known and seq.length == seq.prompt_len + len(seq.output_token_ids)
            elif seq.length < seq.max_length:
                others += take
        return ([], known) if others or len(self.waiting) else (decoding, known)

    def _fit(self, seq: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading ``drafts`` for which ``seq`` has KV blocks, or gets some without preemption."""
        size = self.config.block_size
        while seq.length + len(drafts) > len(seq.block_ids) * size and self.blocks.grow(seq):
            pass
        return drafts[: len(seq.block_ids) * size - seq.length]

    def _plan_row(self, seq: Sequence, end: int, plan: Plan) -> None:
        """Add ``seq`` to the step up to position ``end``, with a draw if that completes it."""
        state = seq.request
        start = seq.scheduled
        seq.scheduled = end
        seq.last_step = plan.step
        asked = state.asked(end)
        block_ids = seq.block_ids
        draws: tuple[Draw, ...] = ()
        if end == seq.length:
            draws = seq.draws if state.prompt_done else self._complete_prompt(seq, plan)
            seq.length = end + 1
        plan.rows.append(
            ScheduledRow(
                seq.seq_id,
                start,
                end - start,
                seq.prompt_token_ids,
                seq.output_token_ids,
                block_ids,
                draws,
                *asked,
                adapter=seq.adapter,
            )
        )
        plan.sequences.append(seq)

    def _complete_prompt(self, leader: Sequence, plan: Plan) -> tuple[Draw, ...]:
        """Fork the choices when the leader's last prompt chunk is planned. Returns the draws of the living choices."""
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
        """Ensure that ``seq`` has its own blocks for writing up to position ``end``, by preemption if necessary. False
        if it cannot run in this step: it was preempted itself, or blocks are freed only after the step in flight."""
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

    def _share_out(self) -> bool:
        """Give places, or KV blocks, of clients above their share to clients below, if there are too few for the queue
        (``policies/places``). Sequences that get them move to the head of the queue, and those that lose theirs wait
        right behind. Returns True if one of them can be admitted now."""
        front, blocks = list(islice(self.waiting, LOOKED_AT)), self.blocks
        granted: list[Sequence] = []
        if self._places + sum(map(self._places_of, front)) > self.config.max_num_seqs:
            while self._grant(granted, front, self._places_of, self.config.max_num_seqs, self._lacks_places):
                pass
        if self.held_back == "kv" and not (granted or blocks.returns_pending):
            self._grant(granted, front, blocks.held_or_needed, self.config.num_blocks, self._lacks_blocks)
        return bool(granted) and not blocks.returns_pending

    def _grant(
        self,
        granted: list[Sequence],
        front: list[Sequence],
        amount_of: Callable[[Sequence], int],
        most: int,
        lacks: Callable[[Sequence, list[Sequence]], bool],
    ) -> bool:
        """Give one more waiting sequence what it lacks, beside those of ``granted``, which it joins. Returns False if
        there is none."""
        newcomer: Sequence | None = None
        while True:
            left = [seq for seq in front if seq not in granted]
            found = exchange([*self.running, *granted], left, amount_of, most)
            if found is None or newcomer not in (None, found[0]):
                return False
            if newcomer is None and found[0] is not front[0]:
                self.waiting.move(found[0], (*front[0].rank[:4], found[0].seq_id - BEHIND))
            newcomer, loser = found
            if not lacks(newcomer, granted):
                granted.append(newcomer)
                return True
            loser.rank = self._rank_of_loser(loser, newcomer)
            self._preempt(loser)

    def _lacks_places(self, seq: Sequence, granted: list[Sequence]) -> bool:
        return self._places + sum(map(self._places_of, (*granted, seq))) > self.config.max_num_seqs

    def _lacks_blocks(self, seq: Sequence, granted: list[Sequence]) -> bool:
        """Return True if ``seq`` lacks KV blocks, and will lack them when the steps in flight have returned theirs."""
        return self.blocks.blocks_for(seq.length) + self._watermark > self.cache.num_free + self.blocks.num_pending

    def _rank_of_loser(self, loser: Sequence, newcomer: Sequence) -> Rank:
        """Return the rank of a sequence that loses its place: before the others of its client that wait, or as a new
        request of it, and behind ``newcomer`` in any case. Right behind that it would go before all later newcomers."""
        client = loser.request.spec.client
        others = (seq for seq in self.waiting.in_order() if seq.request.spec.client == client)
        first = next(others, None)
        if first is not None and first.rank[:4] > newcomer.rank[:4]:
            return (*first.rank[:4], loser.seq_id - 2 * BEHIND)
        start = self.arrivals.order.key(client, 0, 0)[0]
        return (max(start, newcomer.rank[0]), *newcomer.rank[1:4], BEHIND + loser.seq_id)

    def _ahead(self, seq: Sequence, plan: Plan) -> int:
        """Return the tokens of a step that a started prompt leaves to prompts of other clients in front of it."""
        counts: dict[str, int] = {}
        for other in islice(self.waiting, LOOKED_AT):
            if other.rank > seq.rank:
                break
            client = other.request.spec.client
            counts[client] = counts.get(client, 0) + other.to_compute
        counts.pop(seq.request.spec.client, None)
        return sum(min(count, plan.rooms.get(client, count)) for client, count in counts.items())

    def _preempt(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence, which then waits to be recomputed."""
        self.running.remove(seq)
        self._places -= self._places_of(seq)
        self.blocks.release(seq)
        self._last.clear()  # when it comes back, its blocks are others
        seq.cached = 0
        self.waiting.push(seq)
        self._preemptions += 1

    def _admit(self, spare: int, plan: Plan) -> None:
        """Admit as many sequences from the head of the queue as ``spare`` tokens, the places and the KV blocks
        allow."""
        if self._static:
            self._admit_static(spare, plan)
            return
        most, graph = self.config.graph_prompts, self.config.graph_tokens or 0
        prompts, tokens = plan.sizes() if most is not None and len(self.waiting) else (0, 0)
        passed: Sequence | None = None
        for seq in self.waiting.in_order() if plan.shares or plan.rooms else iter(self.waiting.head, None):
            if spare <= 0 or (most is not None and prompts >= most and tokens <= graph):
                break
            if not plan.allows(seq.to_compute, seq.request.spec.client):
                # Its like, or its client, have taken their share: it does not hold up others.
                if seq.request.spec.client not in plan.rooms:
                    passed = passed or seq
                continue
            used = self._try_admit(seq, spare, plan, passed)
            if used is None:
                break
            spare, prompts, tokens = spare - used, prompts + (used > 1), tokens + used

    def _admit_static(self, spare: int, plan: Plan) -> None:
        """Admit preempted members of the current batch; when all have ended, the next batch."""
        fresh = not (self.running or self.waiting.num_preempted or self.blocks.returns_pending)
        reserved = 0
        while (seq := self.waiting.head()) is not None:
            if seq.request.first_scheduled is None:
                reserved += most_blocks(seq.request.spec, self.config)
                if not fresh or (self.running and reserved > self.config.num_blocks):
                    self.held_back = "batch"
                    break
            used = self._try_admit(seq, spare, plan)
            if used is None:
                break
            spare -= used

    def _try_admit(self, seq: Sequence, spare: int, plan: Plan, passed: Sequence | None = None) -> int | None:
        """Admit ``seq``, if possible, and plan its first tokens, at most ``spare``. Returns their number. ``passed``:
        the queue's head, if ``seq`` overtakes it."""
        blocks, state = self.blocks, seq.request
        if seq.last_step > blocks.committed_step:  # preempted while a step of it is in flight
            self.held_back = "flight"
            return None
        others = 0 if passed is None else self._places_of(passed)
        if (barrier := self._barrier(seq, others)) is not None:
            self.held_back = barrier
            return None
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
            if self.config.enable_prefix_caching and (state.prompt_done or state.spec.cacheable):
                self._prefix_query_tokens += seq.prompt_len
                self._prefix_hit_tokens += seq.scheduled
        take = plan.take(seq, spare) if spare > 0 else 0
        if take:
            self._plan_row(seq, seq.scheduled + take, plan)
        return take

    def _barrier(self, seq: Sequence, others: int = 0) -> str | None:
        """Return what ``seq`` lacks until a running sequence ends: places, or a slot for its adapter; None if nothing.
        ``others``: places that are kept for others."""
        if self._places + others + self._places_of(seq) > self.config.max_num_seqs:
            return "places"
        return "adapters" if seq.adapter and self._lacks_slot(seq.adapter) else None

    def admits_none(self) -> bool:
        """Return True if no sequence can be admitted before a running one ends, as long as all of these only decode."""
        head = self.waiting.head()
        if head is None:
            return True
        if self._static or self.held_back not in BARRED:
            return False
        if self.cache.enable_prefix_caching:  # blocks that are needed may turn out to be there
            return self._barrier(head) is not None
        needed = self.blocks.blocks_for(head.length) + self._watermark
        return needed > self.cache.num_free or self._barrier(head) is not None

    def _lacks_slot(self, adapter: str) -> bool:
        """Return True if sequences with as many other adapters run as there may be."""
        most = self.config.max_adapters
        if most is None:
            return False
        others = {seq.adapter for seq in self.running if seq.adapter}
        return adapter not in others and len(others) >= most
