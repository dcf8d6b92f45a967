"""Random workloads for the engine, and a run that checks every promise of the scheduler while one goes through.

``run`` drives the shipping ``Scheduler`` and ``EngineCore`` with a virtual clock and a ``CheckingExecutor``. What each
choice must yield is computed beforehand by ``expected_tokens``, from the request alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from expected_answers import EOS, can_fit, expected_tokens
from grammar_fakes import Steps
from hypothesis import note
from hypothesis import strategies as st
from kv_checker import VOCAB, Broken, CheckedCache, CheckingExecutor, DraftingExecutor, HeadDevice, check

from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.drafters.drawn import DrawnDrafts
from transect.engine.scheduling.drafters.eagle import HeadDrafter
from transect.engine.scheduling.drafters.model import ModelDrafter
from transect.engine.scheduling.drafters.registry import METHODS, SpeculativeConfig
from transect.engine.scheduling.outputs import EngineOutput
from transect.engine.scheduling.policies.admission import QueueFull
from transect.engine.scheduling.policies.budget import PAUSES
from transect.engine.scheduling.policies.model_speculation import ModelSpeculation
from transect.engine.scheduling.policies.turns import LEAST, MOST_OWED
from transect.engine.scheduling.request import Rank, Request, RequestState, Sequence, Status
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.sequence_blocks import SequenceBlocks


def _stall_limit(lag: int) -> int:
    """Steps in which the running sequence of the best rank may stand still: ``lag`` to wait for blocks of the steps in
    flight, ``lag`` for its own token in flight, one because it was admitted in between."""
    return 2 * max(lag, 1) + 1


def _begun(state: RequestState) -> bool:
    """Return True if the answers of a request were begun elsewhere."""
    return state.spec.output_token_ids is not None


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes. ``fail`` is (choice, position) at which the device fails; choice -1: the prompt."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    client: int = 0
    fail: tuple[int, int] | None = None
    grammar: tuple[int, int, int | None] | None = None
    """Seed, length, and after how many tokens it cannot go on (``grammar_fakes.Steps``)."""
    begun: tuple[tuple[int, ...] | None, ...] | None = None
    """See ``Request.output_token_ids``."""


@dataclass(frozen=True)
class Abort:
    """End a request, or one of its choices, before a step or while that step's batch is in flight."""

    step: int
    request: int
    choice: int | None = None
    in_flight: bool = False


@dataclass(frozen=True)
class Break:
    """The device raises in a step, at a place that ``CheckingExecutor.breaks`` names."""

    step: int
    where: str


@dataclass(frozen=True)
class Workload:
    config: SchedulerConfig
    arrivals: tuple[Arrival, ...]
    aborts: tuple[Abort, ...] = ()
    lag: int = 0
    late: bool = False
    breaks: tuple[Break, ...] = ()


_DOCUMENTS = tuple(tuple((7 * i * (k + 1) + k) % VOCAB for i in range(24)) for k in range(2))


def _arrivals(storm: bool, crowd: bool) -> st.SearchStrategy[Arrival]:
    """Prompts begin with a piece of one of two documents, so that prefixes are shared; in a storm outputs are long and
    all come at once, in a crowd some prompts are long."""

    def build(  # type: ignore[no-untyped-def]
        step, document, head, tail, n, max_tokens, min_tokens, stop, bits, score, priority, client, seed, fail, grammar
    ):
        prompt = _DOCUMENTS[document][:head] + tuple(tail)
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens) if max_tokens else min_tokens,
            stop_token_ids=stop,
            ignore_eos=bool(bits & 1) or storm,
            logprobs=1 if bits & 2 else None,
            prompt_logprobs=0 if bits & 12 == 12 else None,
            prompt_logprobs_start=score * len(prompt) // 6 if bits & 12 == 12 else 0,
            seed=seed,
        )
        if grammar is not None:  # min_tokens would hide the end where the grammar allows nothing else
            params = params.with_(min_tokens=0)
        return Arrival(step, prompt or (1,), params, priority, client, fail, grammar)

    return st.builds(
        build,
        st.just(0) if storm else st.integers(0, 12),
        st.integers(0, 1),
        st.sampled_from((0, 1, 2, 20, 24)) if crowd else st.integers(0, 12),
        st.lists(st.integers(0, VOCAB - 1), max_size=3),
        st.sampled_from((1, 1, 1, 2, 3)),
        st.integers(4, 16) if storm else st.one_of(st.none(), st.integers(1, 10)),
        st.just(0) if storm else st.integers(0, 3),
        st.just([]) if storm else st.lists(st.integers(0, VOCAB - 1), max_size=1),
        st.integers(0, 15),
        st.integers(0, 5),
        st.integers(-1, 1),
        st.sampled_from((0, 0, 1, 2)),
        st.integers(0, 2),
        st.one_of(st.none(), st.none(), st.none(), st.tuples(st.integers(-1, 1), st.integers(0, 20))),
        st.one_of(
            st.none(),
            st.none(),
            st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from((None, None, None, 0, 3))),
        ),
    )


def _speculation() -> st.SearchStrategy[SpeculativeConfig]:
    """Drafters that find many matches among so few tokens, some of them right."""
    looked_up = st.fixed_dictionaries({"method": st.sampled_from(sorted(METHODS))})
    model = st.sampled_from(({"method": "draft_model", "model": "small"}, {"method": "eagle3", "model": "head"}))
    return st.builds(
        lambda method, **settings: SpeculativeConfig(**method, **settings),
        method=st.one_of(looked_up, model),
        num_speculative_tokens=st.integers(1, 5),
        prompt_lookup_min=st.integers(1, 2),
        adaptive=st.sampled_from((False, False, True)),
    )


@st.composite
def workloads(
    draw: st.DrawFn,
    *,
    lag: int,
    batching: str = "continuous",
    storm: bool = False,
    crowd: bool = False,
    depth: int = 1,
    breaking: bool = False,
    drafting: bool = False,
) -> Workload:
    """Random workloads. ``storm``: pools so small that sequences drive each other out all the time; ``crowd``: steps so
    small that long prompts stand in the way of short ones; ``depth``: of a pipeline; ``breaking``: steps raise;
    ``drafting``: tokens are drafted."""
    block_size = draw(st.integers(1, 4))
    max_model_len = draw(st.integers(20, 34)) if storm or crowd else draw(st.integers(8, 34))
    enough = -(-(max_model_len - 1) // block_size)
    max_num_seqs = draw(st.sampled_from((6, 8) if crowd else (1, 2, 3, 3, 4, 5, 6)))
    config = SchedulerConfig(
        num_blocks=enough
        + draw(st.integers(enough if crowd else 0, 2 if storm else 3 * enough if crowd else 2 * enough)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 2 if crowd else 16)),
        max_mixed_tokens=draw(st.one_of(st.none(), st.integers(max_num_seqs, max_num_seqs + 8))),
        fill_tokens=draw(st.one_of(st.none(), st.integers(max_num_seqs, max_num_seqs + 8))),
        itl_target=draw(st.sampled_from((0.0, 1.5) if crowd else (None, None, 0.0, 1.5))),
        graph_tokens=draw(st.sampled_from((None, None, 4, 12))),
        graph_prompts=draw(st.sampled_from((None, None, 1, 2))),
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.booleans()),
        batching=batching,  # type: ignore[arg-type]
        scheduling_policy=draw(st.sampled_from(("fcfs", "priority"))),
        longest_first=draw(st.booleans()),
        max_queue=draw(st.sampled_from((None, None, 1, 3))),
        max_prefill_chunk=draw(st.sampled_from((None, None, 1, 3, 7))),
        watermark=draw(st.sampled_from((0.0, 0.01, 0.3))),
        pipeline_depth=depth,
        seed=1,
        speculation=draw(_speculation()) if drafting else None,
    )
    arrivals = draw(st.lists(_arrivals(storm, crowd), min_size=4 if crowd else 1, max_size=10))
    aborts = draw(
        st.lists(
            st.builds(
                Abort,
                st.integers(0, 20),
                st.integers(0, len(arrivals) - 1),
                st.one_of(st.none(), st.integers(0, 2)),
                st.booleans(),
            ),
            max_size=3,
        )
    )
    late = lag > 1 or draw(st.booleans())
    places = st.sampled_from(("submit", "submitted", "draw", "result"))
    breaks = draw(st.lists(st.builds(Break, st.integers(1, 20), places), max_size=4)) if breaking else []
    return Workload(config, tuple(arrivals), tuple(aborts), lag, late, tuple(breaks))


@st.composite
def preempted_failures(draw: st.DrawFn) -> Workload:
    """One of two sequences is driven out about when its logits are not finite, and its prompt comes again later."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": draw(st.integers(7, 9))}
    config = SchedulerConfig(num_blocks=draw(st.integers(8, 14)), block_size=1, watermark=0.0, seed=1, **sizes)
    other = tuple(range(1, draw(st.integers(2, 5))))
    prompt, long = (7, 6, 5), SamplingParams(seed=1, ignore_eos=True, max_tokens=20)
    fails = Arrival(0, prompt, long, fail=(0, draw(st.integers(3, 8))))
    later = Arrival(draw(st.integers(3, 9)), prompt, long.with_(max_tokens=1))
    return Workload(config, (Arrival(0, other, long), fails, later), lag=1, late=draw(st.booleans()))


@dataclass
class _Record:
    """Output of one choice."""

    tokens: list[int]
    begun: int  # tokens that it had when it came
    end: EngineOutput | None = None
    aborted: bool = False


class Run:
    """One workload on its way through the engine. ``finish`` raises ``Violation`` where a promise is broken."""

    def __init__(
        self,
        workload: Workload,
        *,
        blocks_class: type[SequenceBlocks] = SequenceBlocks,
        scheduler_class: type[Scheduler] = Scheduler,
        cache_class: type[CheckedCache] = CheckedCache,
    ) -> None:
        config = workload.config
        self.workload = workload
        self.clock = VirtualClock()
        self.scheduler = scheduler_class(config, self.clock)
        cache = cache_class(config.num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler.cache = cache
        self.scheduler.blocks = blocks_class(cache, config.block_size)
        self.executor = CheckingExecutor(
            config,
            late=workload.late,
            fails=self._fails,
            on_submit=lambda: self._abort(in_flight=True),
            ended=lambda seq_id: self._choices[seq_id].finish_reason is not None,
            breaks=self._breaks,
        )
        self.executor.holders = self._holders
        self._left = list(workload.breaks)
        cache.on_garbage = self.executor.poison
        if isinstance(self.scheduler.speculation, ModelSpeculation):
            self.scheduler.speculation.model = self._drafter(config)
        self.core = EngineCore(self.scheduler, self.executor, lag=workload.lag)
        self.records: dict[tuple[str, int], _Record] = {}
        self.arrival_of: dict[str, Arrival] = {}
        self.prompt_logprobs: dict[str, list] = {}
        self.steps = 0
        self._sequence_ids: dict[int, tuple[Arrival, int]] = {}
        self._choices: dict[int, Sequence] = {}
        self._leader: tuple | None = None
        self._waits: dict[str, int] = {}
        self._stalled = self._held = 0

    def _drafter(self, config: SchedulerConfig) -> DrawnDrafts:
        """A small model on a checking device, with a pool that may be too small for all sequences; or a head, in the
        blocks of the engine."""
        if config.speculation.reads_model:
            limits = {"max_tokens": config.max_num_batched_tokens, "max_rows": config.max_num_seqs}
            return HeadDrafter(
                HeadDevice(config.block_size),
                blocks=self.scheduler.blocks,
                max_model_len=config.max_model_len,
                clock=self.clock,
                **limits,
            )
        config = dataclasses.replace(
            config,
            num_blocks=max(2, config.num_blocks // 2),
            max_prefill_chunk=None,
            max_mixed_tokens=None,
            pipeline_depth=1,
        )
        executor = DraftingExecutor(config, late=self.workload.late, breaks=self._breaks)
        drafter = ModelDrafter(
            executor,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_tokens=config.max_num_batched_tokens,
            max_rows=config.max_num_seqs,
            max_model_len=config.max_model_len,
            clock=self.clock,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        cache = CheckedCache(config.num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        drafter._blocks.cache = cache
        cache.on_garbage = executor.poison
        return drafter

    def finish(self) -> Run:
        """Run to the end, checking all the way."""
        todo = sorted(enumerate(self.workload.arrivals), key=lambda item: item[1].step)
        bound = 60 * (1 + len(self.workload.breaks)) + 4 * sum(
            a.params.n * min(len(a.prompt) + (a.params.max_tokens or 99), self.workload.config.max_model_len)
            for _, a in todo
        )
        while todo or self.core.has_work:
            while todo and todo[0][1].step <= self.steps and self._add(*todo[0]):
                todo.pop(0)
            self._abort(in_flight=False)
            self._step()
            check(self.steps <= bound, f"not done after {bound} steps: starvation or livelock")
        self._check_end()
        return self

    def _add(self, index: int, arrival: Arrival) -> bool:
        """False when the queue is full and the request must come again."""
        name = f"r{index}"
        grammar = None
        if arrival.grammar is not None:
            seed, length, fails_at = arrival.grammar
            grammar = Steps(seed, VOCAB, length, fails_at=fails_at)
        priority = arrival.priority if self.workload.config.scheduling_policy == "priority" else 0
        client = f"c{arrival.client}", 1.0 + arrival.client
        fields = arrival.prompt, arrival.params, priority, None, (EOS,), grammar, None, *client, arrival.begun
        request = Request(name, *fields)
        try:
            self.core.add(request)
        except QueueFull as full:
            most = self.workload.config.max_queue
            beyond = sum(_begun(s) and any(c.status is Status.WAITING for c in s.choices) for s in self._states())
            check(most <= self.scheduler.stats().waiting <= most + beyond, "the queue is not full, or too full")
            check(1.0 <= full.retry_after <= 60.0, "retry_after out of range")
            return False
        except ValueError:
            check(not can_fit(arrival, self.workload.config), f"{name} fits and was refused")
            return True
        check(can_fit(arrival, self.workload.config), f"{name} can never fit and was taken")
        self.arrival_of[name] = arrival
        for seq in self.scheduler.requests[name].choices:
            begun = self.executor.begun[seq.seq_id] = tuple(seq.output_token_ids)
            if seq.finish_reason is None:
                self.records[name, seq.index] = _Record(list(begun), len(begun))
            self._sequence_ids[seq.seq_id] = (arrival, seq.index)
            self._choices[seq.seq_id] = seq
        return True

    def _abort(self, *, in_flight: bool) -> None:
        for abort in self.workload.aborts:
            if abort.step == self.steps and abort.in_flight == in_flight:
                self.core.abort(f"r{abort.request}", abort.choice)
                for (name, index), record in self.records.items():
                    if name == f"r{abort.request}" and abort.choice in (None, index) and record.end is None:
                        record.aborted = True

    def _fails(self, seq_id: int, position: int) -> str | None:
        arrival, choice = self._sequence_ids[seq_id]
        if arrival.fail is None:
            return None
        where, at = arrival.fail
        in_prompt = position < len(arrival.prompt)
        if where != -1 and arrival.grammar is not None:
            return None  # a token that the grammar forces is not drawn, and nothing can fail there
        hit = in_prompt and position >= at if where == -1 else not in_prompt and (where, at) == (choice, position)
        return f"planned failure at {position}" if hit else None

    def _breaks(self, step: int, where: str) -> BaseException | None:
        found = Break(step, where)
        if found not in self._left:
            return None
        self._left.remove(found)
        return Broken(f"as planned in step {step}")

    def _step(self) -> None:
        try:
            self._step_on()
        except Broken:
            self._check_pool()
            check(self.scheduler.stats().kv_blocks_used == 0, "blocks are in use after a step was taken back")
            self._leader = None
            self.clock.advance(1.0)
            self.steps += 1

    def _step_on(self) -> None:
        before = (self.scheduler._step, len(self.scheduler._in_flight))
        waiting = [(seq, seq.to_compute, seq.rank) for seq in self._sequences() if seq.status is Status.WAITING]
        check(self.scheduler.coming().tokens <= self.workload.config.max_num_batched_tokens, "too much is coming")
        outputs = self.core.step()
        for output in outputs:
            self._take(output)
        self._check_pool()
        self._check_order(waiting)
        self._check_waits(before[0])
        self._check_progress()
        idle = not outputs and (self.scheduler._step, len(self.scheduler._in_flight)) == before
        check(not (idle and self.core.has_work), "work, but a step without batch, result and output: livelock")
        self.clock.advance(1.0 + 0.1 * (len(self.scheduler._last[-1]) if self.scheduler._last else 0))
        self.steps += 1

    def _holders(self, block_id: int) -> set[int]:
        """The choices of requests that have a block, or had it for a step in flight before they were preempted. Choices
        that are not forked yet get those of their leader."""
        reading = {
            row.seq_id for batch, _ in self.scheduler._in_flight for row in batch.rows if block_id in row.block_ids
        }
        holding = [state for state in self._states() if any(block_id in seq.block_ids for seq in state.choices)]
        return reading | {seq.seq_id for state in holding for seq in state.choices}

    def _states(self) -> list[RequestState]:
        return list(self.scheduler.requests.values())

    def _sequences(self) -> list[Sequence]:
        return [seq for state in self._states() for seq in state.choices]

    def _take(self, output: EngineOutput) -> None:
        name, index = output.request_id, output.index
        record = self.records[name, index]
        check(record.end is None, f"{name}/{index} has news after its end")
        arrival = self.arrival_of[name]
        params = arrival.params
        at = len(arrival.prompt) + len(record.tokens)
        record.tokens += output.new_token_ids
        check(bool(output.new_token_ids) != (output.finish_reason in ("abort", "error")), f"{name}/{index}: no news")
        if params.logprobs is not None and output.new_token_ids:
            check(output.logprobs is not None and len(output.logprobs) == len(output.new_token_ids), "logprobs missing")
            for i, entry in enumerate(output.logprobs or ()):
                check((entry.token_id, entry.logprob) == (output.new_token_ids[i], -float(at + i)), "wrong logprobs")
        else:
            check(output.logprobs is None, "logprobs that nobody asked for")
        if output.prompt_logprobs is not None:
            check(name not in self.prompt_logprobs, "prompt logprobs twice")
            self.prompt_logprobs[name] = output.prompt_logprobs
        cached = output.num_cached_tokens
        check(cached < len(arrival.prompt) and cached % self.workload.config.block_size == 0, "cached tokens")
        most = max(params.prompt_logprobs_start - 1, 0)
        check(cached <= most or params.prompt_logprobs is None, "a token was cached whose logits are needed")
        first = bool(output.new_token_ids) and len(record.tokens) == record.begun + len(output.new_token_ids)
        notable = first or output.finish_reason is not None
        check(notable == (output.times is not None), "times belong to the first and the last output")
        if output.finish_reason is not None:
            record.end = output
            times = output.times
            assert times is not None and times.finished is not None
            moments = [times.arrival, times.first_scheduled, times.first_token, times.finished]
            known = [moment for moment in moments if moment is not None]
            check(known == sorted(known), f"times out of order: {moments}")

    def _check_pool(self) -> None:
        """Reference counts are exactly the references there are, and each free block is free once."""
        blocks, cache = self.scheduler.blocks, self.scheduler.cache
        refs = [0] * cache.num_blocks
        held = [seq.block_ids for seq in self._sequences()]
        held += [block_ids for waiting in blocks._after_step.values() for block_ids in waiting]
        for block_ids in held:
            for block_id in block_ids:
                refs[block_id] += 1
        check(refs == cache._refs, f"reference counts {cache._refs}, but the references are {refs}")
        free = [*cache._blank, *cache._unused]
        check(
            sorted(free) == [b for b in range(cache.num_blocks) if not refs[b]], "the free blocks are not the free ones"
        )
        check({h: b for b, h in cache._hash_of.items()} == cache._block_of, "the prefix cache disagrees with itself")
        left = sum(seq.to_compute for seq in self._sequences() if seq.status is Status.WAITING)
        check(self.scheduler.waiting.num_tokens == left, "tokens that wait are counted wrongly")
        places = sum(self.scheduler._places_of(seq) for seq in self.scheduler.running)
        check(places == self.scheduler._places <= self.workload.config.max_num_seqs, "places are counted wrongly")

    def _check_order(self, waiting: list[tuple[Sequence, int, Rank]]) -> None:
        """Admitted sequences were ahead of all that wait; or, where time sizes steps, shorter, and the first fits."""
        admitted = [each for each in waiting if each[0].status is Status.RUNNING]
        left = [each for each in waiting if each[0].status is Status.WAITING]
        left.sort(key=lambda each: each[0].rank)
        for seq, length, rank in admitted:
            # Before the step and after it: an exchange of places moves a sequence to the head in between. Of two that
            # were moved, the second may stand before the first without having been there when that was admitted.
            moved = seq.rank != rank
            passed = [
                (s, tokens)
                for s, tokens, before in left
                if s.rank < seq.rank and before < rank and not (moved and s.rank != before)
            ]
            if not passed:
                continue
            check(self.workload.config.itl_target is not None, "a waiting sequence was overtaken")
            # Others go before clients that are limited.
            limited = self.scheduler.budget.rooms.limited
            held = [(s, tokens) for s, tokens in passed if s.request.spec.client not in limited]
            if not held:
                continue
            # Where many wait at once, short ones may use up their share before a longer one does.
            many = bool(self.workload.breaks) or any(_begun(each.request) for each in (seq, *(s for s, _ in passed)))
            shorter = length < min(tokens for _, tokens in held) or many
            check(shorter, "a waiting sequence was overtaken by one that is no shorter")
            blocks = self.scheduler.blocks.blocks_for(held[0][1])
            check(blocks <= self.scheduler.cache.num_free, "a waiting sequence was overtaken and has no room now")

    def _check_waits(self, step: int) -> None:
        """Prompts of a client that owes time wait for a bounded number of steps."""
        if self.scheduler._step > step:
            limited = self.scheduler.budget.rooms.limited
            self._waits = {client: 1 + self._waits.get(client, 0) for client, part in limited.items() if not part}
            check(all(steps < MOST_OWED / LEAST for steps in self._waits.values()), "a client waits for too long")

    def _check_progress(self) -> None:
        """The running sequence of the best rank moves on, unless prompts wait because others were long."""
        running = self.scheduler.running
        first = running[0] if running else None
        leader = first and (first.seq_id, first.scheduled, first.length, len(first.output_token_ids))
        waits = first is not None and self.scheduler._held_prompt and first.length - first.scheduled > 1
        stands = leader is not None and leader == self._leader
        self._stalled, self._held = (self._stalled + (not waits), self._held + waits) if stands else (0, 0)
        self._leader = leader
        check(self._stalled <= _stall_limit(self.workload.lag), f"{first} has stood still for {self._stalled} steps")
        check(self._held < MOST_OWED / LEAST + 2 * PAUSES, f"{first} has waited for {self._held} steps")

    def _check_end(self) -> None:
        for (name, index), record in self.records.items():
            check(record.end is not None, f"{name}/{index} never ended")
            assert record.end is not None
            self._check_tokens(name, index, record, record.end)
        for name, entries in self.prompt_logprobs.items():
            arrival = self.arrival_of[name]
            first = max(arrival.params.prompt_logprobs_start, 1)
            want = [(token, -float(i)) if i >= first else None for i, token in enumerate(arrival.prompt)]
            check([e and (e.token_id, e.logprob) for e in entries] == want, f"prompt logprobs of {name}")
        stats = self.scheduler.stats()
        check(stats.kv_blocks_used == 0, f"{stats.kv_blocks_used} blocks leaked")
        check(not (stats.running or stats.waiting or stats.preempted), f"gauges not back at zero: {stats}")
        check(sum(stats.finished.values()) == len(self.records), "finished choices are counted wrongly")
        drawn = sum(len(r.tokens) - r.begun for r in self.records.values())
        check(stats.generation_tokens == drawn, "tokens are counted wrongly")
        check(not self.scheduler.blocks.returns_pending, "blocks wait for a step that is done")
        check(not self.scheduler.blocks._copy_sources, "copy sources are held for ever")

    def _check_tokens(self, name: str, index: int, record: _Record, end: EngineOutput) -> None:
        arrival = self.arrival_of[name]
        params = arrival.params
        tokens, reason, stop_reason = expected_tokens(arrival, self.workload.config, index)
        where = f"{name}/{index}"
        if end.finish_reason == "abort":
            check(record.aborted, f"{where} was not aborted by anybody")
            check(record.tokens == tokens[: len(record.tokens)], f"{where} yields {record.tokens} of {tokens}")
        elif arrival.fail is not None and arrival.fail[0] == -1 and end.finish_reason == "error":
            check("planned failure" in (end.error or ""), f"{where} failed in another way")
            check(record.tokens == tokens[: len(record.tokens)], f"{where} yields {record.tokens} of {tokens}")
        else:
            check(record.tokens == tokens, f"{where} yields {record.tokens}, alone it yields {tokens}")
            got = (end.finish_reason, end.stop_reason)
            check(got == (reason, stop_reason), f"{where} ends with {got}, not {(reason, stop_reason)}")
            check((end.error is not None) == (reason == "error"), f"{where}: error text")
        if record.tokens and params.prompt_logprobs is not None:
            told = any(arrival.begun or ())  # where it began
            check((name in self.prompt_logprobs) != told, f"{name} got no prompt logprobs, or twice")


def run(workload: Workload, **classes: type) -> Run:
    """Run a workload to its end and check everything. Raises Violation, or an assertion inside the engine."""
    note(str(workload)[:20_000])
    return Run(workload, **classes).finish()
