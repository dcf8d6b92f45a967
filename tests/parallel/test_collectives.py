"""Measured collectives between two ranks: every form once, right; and wrong numbers are counted."""

import pytest

from transect.bench.collectives import COLLECTIVES, JOB, Sweep, measure


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_right(pair, dtype):
    plan = Sweep(tuple(COLLECTIVES), (8, 4096), dtype, iterations=2)
    pair.call(JOB, plan)
    rows = measure(pair.world, plan)
    forms = [(row.collective, row.in_place) for row in rows if row.bytes == 4096]
    both = [(name, place) for name in ("all_reduce", "all_gather", "reduce_scatter") for place in (False, True)]
    assert forms == [*both, ("all_to_all", False), ("send_recv", False)]
    assert all(row.wrong == 0 and row.seconds > 0 and row.algbw == row.bytes / row.seconds for row in rows)


def test_wrong_numbers_are_counted(pair):
    plan = Sweep(tuple(COLLECTIVES), (4096,), iterations=1)
    pair.call("parallel_jobs:measure_with_other_numbers", plan)
    assert all(row.wrong > 0 for row in measure(pair.world, plan))
