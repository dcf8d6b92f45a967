"""The engine loop: how far it plans ahead, and that nobody can tell from the outputs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from kv_checker import CheckingExecutor

from transect.engine.scheduling.batch import PLACEHOLDER, ScheduledBatch
from transect.engine.scheduling.clock import VirtualClock, WallClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig

CONFIG = SchedulerConfig(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)


class Spy:
    """Notes what is submitted and when results are asked for."""

    def __init__(self, log: list[str], tokens: list[list[int]], config: SchedulerConfig = CONFIG) -> None:
        self.device = CheckingExecutor(config, late=True)
        self.log = log
        self.tokens = tokens

    def submit(self, batch: ScheduledBatch):
        self.log.append(f"submit {batch.step}")
        self.tokens.append([token for row in batch.rows for token in row.token_ids])
        handle = self.device.submit(batch)

        class Handle:
            def draw(_self):
                self.log.append(f"draw {batch.step}")
                handle.draw()

            def result(_self):
                self.log.append(f"result {batch.step}")
                return handle.result()

        return Handle()


def run(lag: int):
    log: list[str] = []
    tokens: list[list[int]] = []
    core = EngineCore(Scheduler(CONFIG, VirtualClock()), Spy(log, tokens), lag=lag)
    core.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=3, seed=4)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    return log, tokens, outputs


def test_without_lag_each_result_is_awaited_before_the_next_step_is_planned():
    log, tokens, outputs = run(0)
    assert log == [f"{what} {step}" for step in (1, 2, 3) for what in ("submit", "draw", "result")]
    drawn = [output.new_token_ids[0] for output in outputs]
    assert tokens == [[1, 2, 3], drawn[:1], drawn[1:2]]


def test_with_lag_the_next_step_is_submitted_on_placeholders():
    log, tokens, _ = run(1)
    first, second = ["submit 1", "draw 1", "submit 2", "result 1", "draw 2"], ["submit 3", "result 2", "draw 3"]
    assert log == [*first, *second, "result 3"]
    assert tokens == [[1, 2, 3], [PLACEHOLDER], [PLACEHOLDER]]


def test_the_outputs_are_the_same():
    assert run(0)[2] == run(1)[2]


def test_in_a_pipeline_the_next_step_is_handed_over_before_the_caller_gets_outputs():
    """Both prompts are one step; from then on one sequence is at each stage."""
    log: list[str] = []
    config = replace(CONFIG, pipeline_depth=2)
    core = EngineCore(Scheduler(config, VirtualClock()), Spy(log, [], config), lag=1)
    for name in "ab":
        core.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=3, seed=4)))
    assert core.step() == [] and log == ["submit 1", "draw 1"]
    assert len(core.step()) == 2 and log[2:] == ["result 1", "submit 2", "draw 2"]
    assert len(core.step()) == 1 and log[5:] == ["submit 3", "draw 3", "result 2", "submit 4", "draw 4"]
    assert len(core.step()) == 1 and log[10:] == ["result 3", "submit 5", "draw 5"]


def test_other_lags_are_refused():
    with pytest.raises(ValueError, match=r"lag must be 0 or 1, or less than pipeline_depth .1., got 2"):
        EngineCore(Scheduler(CONFIG, VirtualClock()), CheckingExecutor(CONFIG, late=False), lag=2)


def test_a_step_without_work_does_nothing():
    core = EngineCore(Scheduler(CONFIG, VirtualClock()), CheckingExecutor(CONFIG, late=False))
    assert core.step() == []
    assert not core.has_work
    assert core.stats().steps == 0


def test_the_virtual_clock_never_goes_back():
    clock = VirtualClock()
    clock.advance(1.5)
    assert clock.now() == 1.5
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1.0)
    wall = WallClock()
    assert wall.now() <= wall.now()


@pytest.mark.parametrize("grammar", [False, True])
def test_only_draws_under_grammars_are_said_to_have_waited_for_masks(grammar):
    """A machine that is busy makes any step slow."""
    clock = VirtualClock()
    handle = SimpleNamespace(draw=lambda: clock.advance(1e-3))
    draw = SimpleNamespace(constraint=object() if grammar else None)
    batch = SimpleNamespace(rows=[SimpleNamespace(draws=[draw])])
    core = EngineCore(Scheduler(CONFIG, clock), CheckingExecutor(CONFIG, late=False))
    step = SimpleNamespace(handle=handle, batch=batch)
    core._draw(step)
    assert step.drawn == (1e-3 if grammar else 0.0)
