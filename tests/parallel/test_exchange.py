"""Tokens go to the ranks that have their experts, and what these say comes back; also where a rank has no tokens."""

import pytest
import torch
from parallel_jobs import exchanged

from transect.parallel.exchange import sent_share
from transect.parallel.experts import way_of


@pytest.mark.parametrize("tokens", [(5, 3), (4, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_go_there_and_back(pair, tokens, dtype):
    """Rank r multiplies by r + 1, so a token comes back as often as ranks have its experts."""
    pair.call("parallel_jobs:exchanged", (tokens, dtype))
    x, experts, out, gradient, taken = exchanged(pair.world, (tokens, dtype))
    here, there = (experts < 2).any(1), (experts >= 2).any(1)
    factor = (here + 2.0 * there)[:, None].to(dtype)
    torch.testing.assert_close(out, x * factor)
    torch.testing.assert_close(gradient, torch.ones_like(x) * factor * factor)
    assert taken <= sum(tokens) and (taken or not sum(tokens))


def test_the_way_that_sends_less_is_taken():
    draws = torch.rand(4000, 8).argsort(1)[:, :2]  # two of eight experts, one on each of eight ranks
    assert sent_share(8, 2) == pytest.approx(len(draws[0]) / 8, abs=0.02)
    assert way_of(8, 2) == way_of(2, 1) == "all_to_all" and way_of(2, 8) == "gather"
    assert way_of(2, 8, "all_to_all") == "all_to_all"
