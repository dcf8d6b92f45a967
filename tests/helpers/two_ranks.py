"""Two ranks that tests share: a second process takes seconds to start."""

import os
from pathlib import Path

import pytest

from transect.parallel.launch import Ranks


def started(device):
    """Two ranks, of which this process is one; the other finds the helpers of the tests."""
    helpers = str(Path(__file__).resolve().parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")])]))
        return Ranks.start(2, device)
