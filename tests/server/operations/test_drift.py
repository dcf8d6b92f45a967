"""The alarm that says that steps no longer take the predicted time."""

import logging
from types import SimpleNamespace

from transect.server.operations.drift import WINDOW, DriftWatch


def stats(steps, measured, predicted):
    return SimpleNamespace(timed_steps=steps, step_seconds=measured, predicted_step_seconds=predicted)


def test_the_alarm_is_raised_once_and_ends(caplog):
    watch = DriftWatch()
    with caplog.at_level(logging.WARNING):
        watch.look(stats(WINDOW, 10.0, 2.0))  # the engine learns
        assert not watch.raised and watch.ratio == 1
        watch.look(stats(2 * WINDOW - 1, 99.0, 3.0))  # too few steps
        assert not watch.raised
        watch.look(stats(2 * WINDOW, 11.1, 3.0))
        assert not watch.raised and round(watch.ratio, 6) == 1.1
        for looks in (3, 4):
            watch.look(stats(looks * WINDOW, 11.1 + 1.5 * (looks - 2), 3.0 + looks - 2))
            assert watch.raised and round(watch.ratio, 6) == 1.5
        watch.look(stats(5 * WINDOW, 15.1, 6.0))
        assert not watch.raised
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "StepTimeDrift: the last 200 steps took 1.50 times" in said[0] and "is over" in said[1]


def test_a_new_engine_begins_anew():
    watch = DriftWatch()
    for look in (stats(5 * WINDOW, 5.0, 5.0), stats(10, 1.0, 0.1), stats(10 + WINDOW, 2.0, 1.1)):
        watch.look(look)
    assert not watch.raised and round(watch.ratio, 6) == 1.0
