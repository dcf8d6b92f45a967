"""The CPU runner continues answers to the bit: tokens and log-probabilities after any cut are those of a whole run."""

import pytest
from continued_runs import check_cuts
from effort import quick_first


@pytest.mark.parametrize("seed", quick_first(range(40), 2))
def test_every_cut_of_random_requests(seed):
    assert check_cuts(seed) > 20
