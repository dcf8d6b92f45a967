"""Schedules of clients, weights and priorities for an engine on a virtual clock, and the bounds that hold for them.

``tests/engine/scheduling/test_shares_fuzz.py`` and ``benchmarks/checks/shares.py`` check them over random schedules.
"""

from collections import defaultdict
from dataclasses import dataclass

from kv_checker import CheckingExecutor

from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.policies.order import PATIENCE_STEPS
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5, "d": 0.5}


@dataclass(frozen=True)
class Coming:
    step: int
    client: str
    prompt: int
    outputs: int
    priority: int
    n: int


class Engine:
    """An engine on a virtual clock, and what of each request is known from outside."""

    def __init__(self, policy, places, tokens):
        self.config = SchedulerConfig(
            num_blocks=400, block_size=4, max_num_seqs=places, max_num_batched_tokens=tokens, max_model_len=40,
            scheduling_policy=policy, enable_prefix_caching=False, watermark=0.0, seed=1,
        )  # fmt: skip
        self.scheduler = Scheduler(self.config, VirtualClock())
        self.core = EngineCore(self.scheduler, CheckingExecutor(self.config, late=False))
        self.policy = policy
        self.states, self.admitted = {}, []
        self.first_waiting = {}

    def run(self, schedule, after_step=lambda: None):
        left = sorted(schedule, key=lambda coming: coming.step)
        step = 0
        while left or self.core.has_work:
            while left and left[0].step <= step:
                self.add(left.pop(0))
            waiting = [state for state in self.states.values() if state.first_scheduled is None]
            self.core.step()
            self.scheduler.clock.advance(1.0)
            self.admitted += sorted(
                (state for state in waiting if state.first_scheduled is not None), key=lambda state: state.leader.rank
            )
            after_step()
            step += 1
            assert step < 20_000, "it never ends"

    def add(self, coming):
        name = str(len(self.states))
        params = SamplingParams(max_tokens=coming.outputs, ignore_eos=True, seed=1, n=coming.n)
        priority = coming.priority if self.policy == "priority" else 0
        client = coming.client, WEIGHTS[coming.client]
        waiting = defaultdict(list)
        for state in self.states.values():
            if state.first_scheduled is None:
                waiting[state.spec.client].append(state.turn.start)
        now = self.scheduler.arrivals.order.now
        self.first_waiting[name] = {each: min(waiting.get(each, [now])) for each in WEIGHTS}, len(self.admitted)
        prompt = tuple((7 * int(name) + each) % 50 for each in range(coming.prompt))
        self.core.add(Request(name, prompt, params, priority, None, (), None, None, *client))
        self.states[name] = self.scheduler.requests[name]


def check_waits(engine):
    """The bound above, for every request."""
    tokens = PATIENCE_STEPS * engine.config.max_num_batched_tokens
    spread = 0.0 if engine.policy == "fcfs" else 2.0 * tokens
    longest = defaultdict(int)
    for state in engine.states.values():
        longest[state.spec.client] = max(longest[state.spec.client], state.turn.tokens)
    places = {id(state): place for place, state in enumerate(engine.admitted)}
    for name, state in engine.states.items():
        first, admitted_before = engine.first_waiting[name]
        given = defaultdict(int)
        for other in engine.admitted[admitted_before : places[id(state)]]:
            given[other.spec.client] += other.turn.tokens
        for client, weight in WEIGHTS.items():
            if client != state.spec.client:
                bound = weight * (state.turn.start + spread - first[client]) + longest[client]
                assert given[client] <= bound + 1e-6, (name, client, given[client], bound)


def check_order(engine):
    """Nobody has got its first turn before one of its own client that was there, and is as urgent or more."""
    for place, state in enumerate(engine.admitted):
        for later in engine.admitted[place + 1 :]:
            if later.spec.client != state.spec.client or later.arrival > state.arrival:
                continue
            there = int(later.spec.request_id) < int(state.spec.request_id)
            assert not (there and later.spec.priority <= state.spec.priority), "inversion"
