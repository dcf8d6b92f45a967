"""Every start of ranks has a name of its own, whatever those before have left in the store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from transect.parallel.children import RankFailure
from transect.parallel.gathering import start_name


def start(store, size, ranks=None, patience=20.0):
    """The names that ranks have, all of them or some, or their errors."""
    ranks = range(size) if ranks is None else ranks

    def name(rank):
        try:
            return start_name(store, rank, size, patience)
        except RankFailure as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(name, ranks))


def test_one_name_for_each_start():
    store = dist.HashStore()
    first, second = start(store, 3), start(store, 3)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    assert len(set(start(store, 2) + start(store, 1))) == 2  # the next ones may be fewer


def test_a_start_that_failed_leaves_no_answer_for_the_next():
    store = dist.HashStore()
    assert start(store, 3, [1, 2], 0.05) == ["rank 0 did not arrive within 0 s: see what that host says"] * 2
    assert start(store, 3, [0], 0.05) == ["rank 1 did not arrive within 0 s: see what that host says"]
    found = start(store, 3)
    assert len(set(found)) == 1 and "rank" not in found[0]


def test_a_rank_that_comes_again_is_waited_for():
    """Its process ended after it had asked: the question of the next one counts."""
    store = dist.HashStore()
    start(store, 2, [1], 0.0)
    with ThreadPoolExecutor(1) as threads:
        rank_0 = threads.submit(start_name, store, 0, 2, 20.0)
        with pytest.raises(TimeoutError):
            rank_0.result(0.05)
        assert start_name(store, 1, 2, 20.0) == rank_0.result(20.0)
