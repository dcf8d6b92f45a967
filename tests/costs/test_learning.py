"""What is learned of a device from its steps."""

import math
import random
import statistics

import pytest

from transect.costs.learning import StepTimes
from transect.costs.steps import StepLoad
from transect.engine.scheduling.batch import ScheduledBatch, ScheduledRow


def device(work: StepLoad) -> float:
    """A device on which weights take 4 ms, a token 20 us once they are read, and a position of the cache 30 ns."""
    return max(4e-3, 20e-6 * work.tokens) + 3e-8 * work.keys + 2e-10 * work.pairs


def some_work(rng: random.Random) -> StepLoad:
    rows = rng.randint(1, 64)
    prompts = rng.choice((0, 0, 0, rng.randint(16, 2000)))
    return StepLoad(rows + prompts, rows * rng.randint(100, 2000), prompts * rng.randint(1, 2000))


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_few_hundred_steps_teach_how_long_others_take(noise):
    rng, times = random.Random(0), StepTimes()
    for _ in range(500):
        work = some_work(rng)
        times.learn(work, device(work) * rng.gauss(1, noise))
    errors = sorted(abs(times.predict(work) / device(work) - 1) for work in (some_work(rng) for _ in range(300)))
    assert statistics.median(errors) < 0.02 and errors[-4] < 0.15
    assert times.error < 0.05 and times.measured == pytest.approx(times.predicted, rel=0.05)


def test_another_scale_is_learned_as_well():
    """A processor is a thousand times slower, and nothing was set for it."""
    rng, times = random.Random(1), StepTimes()
    for _ in range(300):
        work = some_work(rng)
        times.learn(work, 1000 * device(work))
    work = StepLoad(300, 20_000, 90_000)
    assert times.predict(work) == pytest.approx(1000 * device(work), rel=0.1)


def test_a_part_below_zero_makes_no_large_step_look_short():
    """A few steps of some 2,000 tokens seemed to take no longer than those of 1,000: no larger ones do for that."""
    times = StepTimes()
    for tokens in (4, 4, 100, 250, 500, 1000) * 40:
        times.learn(StepLoad(tokens), max(4e-3, 22e-6 * tokens))
    for tokens in (1600, 2000, 2400) * 3:
        times.learn(StepLoad(tokens), 9e-3)
    assert min(times._parts) < 0
    assert times.most_tokens(12e-3, StepLoad(4), 0, 8192) < 700
    found = [times.predict(StepLoad(tokens)) for tokens in range(1, 4096, 50)]
    assert found == sorted(found)


def test_a_device_that_gets_slower_is_followed():
    rng, times = random.Random(2), StepTimes()
    for step in range(1500):
        work = some_work(rng)
        times.learn(work, device(work) * (1.0 if step < 500 else 1.3))
    errors = [times.predict(work) / device(work) for work in (some_work(rng) for _ in range(200))]
    assert statistics.median(errors) == pytest.approx(1.3, rel=0.04)


def test_one_step_in_which_something_else_ran_changes_little():
    times, work = StepTimes(), StepLoad(8, 800)
    for _ in range(50):
        times.learn(work, 4e-3)
    times.learn(work, 2.0)
    assert times.predict(work) < 6e-3


def test_what_took_no_time_teaches_nothing():
    times = StepTimes()
    times.learn(StepLoad(8, 800), 0.0)
    assert times.steps == 0 and times.predict(StepLoad(8, 800)) == 0


def test_the_most_tokens_that_fit():
    rng, times = random.Random(3), StepTimes()
    for _ in range(500):
        work = some_work(rng)
        times.learn(work, device(work))
    beside = StepLoad(16, 16_000)
    tokens = times.most_tokens(12e-3, beside, 0, 4000)
    assert device(StepLoad(tokens, 16_000)) == pytest.approx(12e-3, rel=0.1)
    assert times.most_tokens(1e-3, beside, 0, 4000) == 16, "the decodes run in any case"
    assert times.most_tokens(1.0, beside, 0, 4000) == 4000
    assert times.most_tokens(12e-3, beside, 30_000, 4000) < tokens, "tokens that attend to much take longer"


def test_a_position_of_a_chunk_may_take_longer_than_one_of_a_row():
    """A chunk's few tiles walk over its context one after another."""
    rng, times = random.Random(2), StepTimes()

    def walked(work: StepLoad) -> float:
        return device(work) + 7e-7 * work.context

    for _ in range(500):
        rows, keys, more = rng.randint(1, 64), rng.randint(100, 2000), rng.choice((0, 0, rng.randint(2, 300)))
        context = rng.randint(300, 7000) if more else 0
        work = StepLoad(rows + more, rows * keys, more * context, context=context)
        times.learn(work, walked(work))
    for tokens in (2, 100):
        work = StepLoad(20 + tokens, 20_000, tokens * 5000, context=5000)
        assert times.predict(work) == pytest.approx(walked(work), rel=0.1)
        assert times.with_chunk(StepLoad(20, 20_000), 20 + tokens, 5000) == pytest.approx(walked(work), rel=0.1)


def test_scored_tokens_fill_a_step_sooner():
    """Logits of each take as long as another token and a half."""
    rng, times = random.Random(4), StepTimes()
    for _ in range(500):
        work = some_work(rng)
        work = work._replace(scored=rng.choice((0, work.tokens // 2)))
        times.learn(work, device(work) + 30e-6 * work.scored)
    beside = StepLoad(16, 16_000)
    plain, all_scored, late = (times.most_tokens(30e-3, beside, 0, 4000, unscored=each) for each in (math.inf, 0, 400))
    assert all_scored == pytest.approx(plain / 2.5, rel=0.15)
    assert late == pytest.approx(all_scored + 400 * 1.5 / 2.5, rel=0.15), "400 tokens cost no logits"


def test_the_work_of_a_batch():
    def row(start: int, count: int) -> ScheduledRow:
        return ScheduledRow(start, start, count, (0,) * 100, [], [])

    batch = ScheduledBatch(1, (row(9, 1), row(4, 1), row(10, 3)))
    assert StepLoad.of((row.start, row.num_tokens) for row in batch.rows) == StepLoad(
        5, 15, 11 + 12 + 13, 3, 1, 5, context=13
    )


def test_what_is_unsure_may_be_over_sooner():
    times, work = StepTimes(), StepLoad(8, 800)
    times.learn(work, 4e-3)
    unsure = times.predict(work) - times.soonest(work)
    for _ in range(100):
        times.learn(work, 4e-3)
    assert 0 <= times.predict(work) - times.soonest(work) < 0.25 * unsure


@pytest.mark.parametrize("seconds", [5e-324, 1e-200, 1e-160, 1e-20, 1e-9])
def test_steps_that_take_next_to_no_time(seconds):
    """A clock may not see them; and predictions may have shrunk to nothing, one late step after another."""
    times = StepTimes()
    for count in range(1, 20):
        times.learn(StepLoad(count), seconds)
    for _ in range(20):
        times.learn(StepLoad(4), 1e-2)
    assert times.predict(StepLoad(4)) == pytest.approx(1e-2, rel=0.1) and math.isfinite(times.error)


def test_a_prediction_that_shrinks_to_nothing_divides_nothing():
    times = StepTimes()
    times.learn(StepLoad(4), 1e-3)
    for _ in range(20_000):
        times.learn(StepLoad(4), 0.9 * times.predict(StepLoad(4)))
    assert times.predict(StepLoad(4)) >= 0 and math.isfinite(times.soonest(StepLoad(4)))


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_first_steps_that_took_long_are_forgotten_at_once(count):
    times, work = StepTimes(), StepLoad(2)
    for _ in range(count):
        times.learn(work, 3.0)
    for _ in range(2):
        times.learn(work, 1e-2)
    assert times.predict(work) == pytest.approx(1e-2, rel=0.3)
    for _ in range(20):
        times.learn(work, 1e-2)
    assert 0.6e-2 < times.soonest(work) < times.predict(work) == pytest.approx(1e-2, rel=0.02)


def test_one_step_that_seemed_short_does_not_undo_what_was_learned():
    times, work = StepTimes(), StepLoad(8)
    for tokens in (500, 250, 100, 60, 20) * 8:
        times.learn(StepLoad(tokens), 4e-3 + 1e-4 * tokens)
        times.learn(work, 4.8e-3)
    times.learn(work, 1e-5)
    for _ in range(3):
        times.learn(work, 4.8e-3)
    assert times.predict(work) == pytest.approx(4.8e-3, rel=0.15)
    assert times.predict(StepLoad(500)) == pytest.approx(54e-3, rel=0.15)
