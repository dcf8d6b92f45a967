"""Policies of a server's steps, simulated: what long prompts do to others."""

import json
from pathlib import Path

import pytest

from benchmarks.engine import step_policy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module():
    return step_policy


@pytest.fixture
def sizes(module):
    return module.Sizes([json.loads((module.record.RESULTS / "h200" / name).read_text()) for name in module.MEASURED])


def test_streams_feel_less_of_long_prompts_where_steps_are_sized_by_time(module, sizes):
    def felt(policy, longs):
        return module.simulate(sizes, *module.POLICIES[policy], 8.0, 0, requests=24, longs=longs)

    plain, whole, timed = felt("by time", 0), felt("whole prompts", 1), felt("by time", 1)
    assert "long_ttft_p50" not in plain and timed["long_ttft_p50"] > 100
    assert plain["itl_p99"] < timed["itl_p99"] < whole["itl_p99"] / 3
    assert timed["ttft_p99"] < whole["ttft_p99"]


def test_three_long_prompts_at_once_hold_up_short_ones_hardly_more_than_one_does(module, sizes):
    one, three, whole = (
        module.simulate(sizes, *module.POLICIES[policy], 8.0, 0, requests=30, longs=longs)
        for policy, longs in (("by time", 1), ("by time", 3), ("whole prompts", 3))
    )
    assert three["ttft_p99"] < 2 * one["ttft_p99"] < whole["ttft_p99"] / 2


def test_the_tables_have_a_row_for_each_policy(module):
    times = {f"{name}_{share}": 1.5 for name in module.NAMES for share in ("p50", "p99")}
    row = {"rate": 8.0, "policy": "by time", "tokens_per_second": 1200.0} | times
    made = {"commit": "0123456789ab", "version": "99.0.0"}
    result = {"rows": [row], "long_rows": [row | {"longs": 3, "long_ttft_p50": 4500.0}], "seeds": 3, "command": "c"}
    result["environment"] = made
    assert "| 8/s | by time | 1,200 | 1.5 |" in module.table(result)
    assert module.long_table(result).splitlines()[2] == "| 3 | by time |" + " 1.5 |" * 8 + " 4,500 |"
