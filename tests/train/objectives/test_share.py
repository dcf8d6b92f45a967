"""Which validation batches a rank measures."""

import pytest

from transect.train.objectives.share import RolloutShare


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 7])
def test_every_batch_counts_once_and_ranks_compute_as_many(batches):
    parts = [list(RolloutShare(rank, 3).of(range(batches))) for rank in range(3)]
    assert sorted(batch for part in parts for batch, counts in part if counts) == list(range(batches))
    assert len({len(part) for part in parts}) == 1


def test_means_are_over_what_all_have_measured():
    other = {"loss": (6.0, 1), "margin": (1.0, 4)}
    share = RolloutShare(0, 2, lambda mine: [mine, other])
    assert share.means({"loss": (3.0, 2)}) == {"loss": (3.0, 3), "margin": (0.25, 4)}
    assert RolloutShare().means({"loss": (0.0, 0)}) == {"loss": (0.0, 0)}
