"""Ranks that many tests share: a second process takes seconds to start, one with a GPU twenty."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from transect.parallel.launch import Ranks


def started(device):
    """Two ranks, of which this process is one; the other finds the helpers of the tests."""
    helpers = str(Path(__file__).resolve().parents[1] / "helpers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")])]))
        return Ranks.start(2, device)


@pytest.fixture(scope="session")
def pair():
    """This process and another one; at most one engine runs on them at a time."""
    ranks = started("cpu")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def gpus():
    """The same, each with a GPU. A process is rank 0 of one set of ranks, so this and ``pair`` exclude each other."""
    if dist.is_initialized():
        pytest.skip("this process has ranks on the CPU: run the tests of several GPUs alone (tests/parallel -m gpu)")
    ranks = started("cuda")
    yield ranks
    ranks.close()
