"""Ordinary users beside attackers, on a virtual clock: the bars of docs/understand/policies.md."""

import pytest

from benchmarks.server.virtual_soak import ATTACKS, Soak, percentiles


@pytest.mark.parametrize("lag", [0, 1])
def test_attackers_delay_no_user_by_more_than_half(lag):
    quiet, attacked = Soak([], 60.0, 1, lag), Soak(list(ATTACKS), 60.0, 1, lag)
    for alone, beside in ((quiet.first, attacked.first), (quiet.between, attacked.between)):
        assert len(beside) > 0.6 * len(alone) > 150
        assert percentiles(beside)["p99"] < 1.5 * percentiles(alone)["p99"]
