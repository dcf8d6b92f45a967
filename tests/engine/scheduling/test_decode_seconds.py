"""The predicted time of the next decode step, and what one more sequence adds to it."""

from itertools import repeat

import pytest

from transect.costs.steps import StepLoad
from transect.engine.scheduling.outputs import SchedulerStats
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine


def seconds(load):
    return 5e-3 + 1e-3 * load.tokens


def engine_with(**settings):
    limits = SchedulerConfig(
        num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512, seed=0, **settings
    )
    engine = SimulatedEngine(
        limits, lambda batch: seconds(StepLoad.of((row.start, row.num_tokens) for row in batch.rows))
    )
    for number in range(12):
        params = SamplingParams(max_tokens=20 + 10 * number, ignore_eos=True)
        engine.add(Request(str(number), (number,) * 8, params, arrival_time=0.0), [repeat(number)])
    return engine


def test_an_engine_tells_what_one_more_sequence_costs_now():
    engine = engine_with(itl_target=1.0)
    for _ in range(60):
        engine.step()
    stats = engine.scheduler.stats()
    rows = stats.running
    assert 0 < rows < 12
    assert stats.next_step_seconds == pytest.approx(5e-3 + 1e-3 * rows, rel=0.15)
    assert stats.next_row_seconds == pytest.approx(1e-3, rel=0.5)
    both = SchedulerStats.sum([stats, stats])
    assert both.next_row_seconds == stats.next_row_seconds and both.running == 2 * rows
    assert stats.of_the_past().next_step_seconds == 0.0
    engine.run()
    idle = engine.scheduler.stats()
    assert idle.next_step_seconds == 0.0 and idle.next_row_seconds > 1e-3


def test_an_engine_that_learns_no_times_knows_no_price():
    engine = engine_with()
    for _ in range(10):
        engine.step()
    assert engine.scheduler.stats().next_row_seconds == 0.0
