"""Step times on a device that pads: what is fitted, what is left out, and that floors are those of the cost model."""

import dataclasses
from array import array

import numpy as np
import pytest

from transect.costs.fitting import FittedSteps, errors
from transect.costs.floors import Rates, step_floor
from transect.costs.model import Row
from transect.costs.storage import Storage
from transect.engine.executors.gpu.step_sizes import row_bucket, token_bucket
from transect.engine.scheduling.decisions import Done, Header, Planned
from transect.explain.engine.calibration import calibrated, followed, known_steps, measured_steps, spread
from transect.explain.engine.log import build
from transect.explain.engine.work import StepWork, padding_of
from transect.spec.shapes import PRESETS

LIMITS = {"block_size": 16, "max_num_seqs": 64, "max_model_len": 2048, "num_blocks": 64}
DEVICE = {"padding": {"graph_tokens": 1024, "multiple": 16, "fine_rows": 1}}
RATES = Rates(4e12, 7e14)


def header(lag=1):
    return Header(1, LIMITS, lag, 0.0, {}, {}, DEVICE)


def step(chance, decodes, chunk):
    rows = [(seq, int(chance.integers(100, 1500)), 1) for seq in range(decodes)]
    return [*rows, (99, 0, chunk)] if chunk else rows


def true_seconds(load):
    """A device that takes its time for what it computes, padding or not, and whose kernels change at 256 tokens."""
    base = 4e-3 if load.chunks else 3e-3
    return base + 1e-8 * load.keys + (1e-5 if load.padded <= 256 else 1.6e-5) * load.padded


def test_sizes_of_the_device_are_what_steps_take():
    """Within a size the tokens do not matter, from one to the next they do; sizes that were not met are in between."""
    work, chance = StepWork(None, Storage(), None, padding_of(header())), np.random.default_rng(0)
    loads = [work.load(step(chance, int(chance.integers(3, 60)), 0)) for _ in range(300)]
    loads += [work.load(step(chance, 5, int(chance.integers(70, 900)))) for _ in range(100)]
    seconds = [true_seconds(load) * chance.normal(1, 0.01) for load in loads]
    model = FittedSteps.fit(loads, seconds)
    fresh = [work.load(step(chance, 4, chunk)) for chunk in range(80, 880, 37)]
    fresh += [work.load(step(chance, rows, 0)) for rows in (1, 2, 7, 33, 63)]
    assert model.errors(fresh, [true_seconds(load) for load in fresh]).p99 < 0.06
    assert fresh[0].padded == token_bucket(84) and fresh[-1].padded == row_bucket(63) == 64


def test_one_step_that_was_held_up_bends_nothing():
    work, chance = StepWork(None, Storage(), None, padding_of(header())), np.random.default_rng(1)
    loads = [work.load(step(chance, 8, 0)) for _ in range(60)]
    seconds = [true_seconds(load) for load in loads]
    seconds[7], seconds[30] = 0.4, 0.2
    assert FittedSteps.fit(loads, seconds).errors(loads, [true_seconds(load) for load in loads]).p99 < 0.03


def test_steps_whose_times_nobody_knows_are_left_out():
    """Step 4 was over when the host came back from handing over step 5; so nobody knows when either ran."""
    records = [header()]
    for number in range(1, 9):
        at = 0.01 * number
        handed, wait = (0.009, 7e-5) if number == 4 else (2e-4, 5e-3)
        rows = array("I", [0, number, 1]).tobytes()
        if number == 1:
            records.append(Planned(1, 0.0, 0.0, rows, 0, "", 0, 1, 4))
        if number < 8:
            rows = array("I", [0, number + 1, 1]).tobytes()
            records.append(Planned(number + 1, at, at - wait - handed, rows, 0, "", 0, 1, 4))
        records.append(Done(number, at - wait, at, at))
    log = build(records)
    assert [each.number for each in log.steps if each.late] == [4]
    assert [each.number for each in known_steps(log)] == [2, 3, 6, 7, 8]
    assert len(measured_steps(log, StepWork.of(log.header, None))[0]) == 5


def test_like_steps_show_what_the_machine_varies_by():
    """Two sequences decode with times that differ by 4%; steps with a third one, or a chunk, are no like steps."""
    records, at = [header(lag=0)], 0.0
    for number in range(1, 61):
        rows = [0, number, 1, 1, number, 1] + ([2, 0, 9] if number == 30 else [2, number, 1] if number == 40 else [])
        records.append(Planned(number, at, at, array("I", rows).tobytes(), 0, "", 0, 1, 4))
        at += 0.01 * (1.0 if number % 2 else 1.04) * (5 if number == 30 else 1)
        records.append(Done(number, at, at, at))
    found = spread(build(records))
    assert found is not None and found.steps == 57 - 3 - 3
    assert found.median == pytest.approx(0.04, rel=0.05) and found.p99 < 0.05
    assert spread(build(records[:20])) is None


def test_predictions_follow_a_machine_that_becomes_slower():
    chance = np.random.default_rng(2)
    predicted = chance.uniform(0.01, 0.02, 200)
    measured = predicted * np.linspace(1.0, 1.6, 200)
    found = errors(followed(predicted, measured), measured)
    assert errors(predicted, measured).median > 0.2 and found.median < 0.02 and found.p99 < 0.03


def test_a_log_that_nobody_waited_for_says_so():
    """A longer log alone would not help where every step was over before the host looked."""
    records = [header()]
    for number in range(1, 40):
        at = 0.01 * number
        records.append(Planned(number, at - 0.009, at - 0.009, array("I", [0, number, 1]).tobytes(), 0, "", 0, 1, 4))
        records.append(Done(number, at - 1e-6, at, at))
    log = build(records)
    with pytest.raises(ValueError, match=r"only 0 of 38 steps have a known time.*async_scheduling=False"):
        calibrated(log, StepWork.of(log.header, None))


@pytest.mark.parametrize("window", [None, 100])
def test_floors_are_those_of_the_cost_model(window):
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], sliding_window=window)
    work = StepWork(config, Storage(), RATES)
    rows = [(0, 2000, 1), (1, 17, 1), (2, 0, 300), (3, 512, 512)]
    for _ in range(2):  # the second time from what is kept
        found = work.floor(rows)
        wanted = step_floor(config, [Row(count, start + count) for _, start, count in rows], RATES, Storage())
        assert found.seconds == pytest.approx(wanted.seconds) and found.bytes == pytest.approx(wanted.bytes)


def test_a_processor_pads_nothing():
    assert padding_of(Header(1, LIMITS, 0, 0.0)) is None
    assert StepWork(None, Storage(), None).load([(0, 5, 1), (1, 0, 77)]).padded == 78
    large = StepWork(None, Storage(), None, padding_of(header()))
    assert large.load([(0, 5, 1), (1, 0, 1500)]).padded == 1504
    assert large.load([(0, 5, 1)] * 65).padded == row_bucket(65, True)
