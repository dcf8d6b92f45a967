"""Ranks that many tests share: a process with a GPU takes twenty seconds to start."""

import pytest
import torch.distributed as dist
from two_ranks import started


@pytest.fixture(scope="session")
def pair(two_ranks):
    """This process and another one; at most one engine runs on them at a time."""
    return two_ranks


@pytest.fixture(scope="session")
def gpus():
    """The same, each with a GPU. A process is rank 0 of one set of ranks, so this and ``pair`` exclude each other."""
    if dist.is_initialized():
        pytest.skip("this process has ranks on the CPU: run the tests of several GPUs alone (tests/parallel -m gpu)")
    ranks = started("cuda")
    yield ranks
    ranks.close()
