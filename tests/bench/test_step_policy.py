"""Policies of a server's steps, simulated: what long prompts do to others."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_policy

    yield step_policy
    for name in ("step_policy", "record"):
        sys.modules.pop(name, None)


@pytest.fixture
def sizes(module):
    return module.Sizes([json.loads((module.record.RESULTS / "h200" / name).read_text()) for name in module.MEASURED])


def test_streams_feel_less_of_long_prompts_where_steps_are_sized_by_time(module, sizes):
    def felt(policy, long_every):
        return module.simulate(sizes, *module.POLICIES[policy], 20.0, 0, requests=30, long_every=long_every)

    plain, whole, timed = felt("by time", 0.0), felt("whole prompts", 0.5), felt("by time", 0.5)
    assert "long_ttft_p50" not in plain and timed["long_ttft_p50"] > 100
    assert plain["itl_p99"] < timed["itl_p99"] < whole["itl_p99"] / 3
    assert timed["ttft_p99"] < whole["ttft_p99"]


def test_the_tables_have_a_row_for_each_policy(module):
    times = {f"{name}_{share}": 1.5 for name in module.NAMES for share in ("p50", "p99")}
    row = {"rate": 8.0, "policy": "by time", "tokens_per_second": 1200.0} | times
    made = {"commit": "0123456789ab", "version": "99.0.0"}
    result = {"rows": [row], "long_rows": [row | {"long_ttft_p50": 4500.0}], "seeds": 3, "command": "c"}
    result["environment"] = made
    assert "| 8/s | by time | 1,200 | 1.5 |" in module.table(result)
    assert module.long_table(result).splitlines()[2] == "| by time |" + " 1.5 |" * 8 + " 4,500 |"
