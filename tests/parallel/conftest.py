"""Two ranks that share many engines: a second process takes seconds to start."""

import os
from pathlib import Path

import pytest

from transect.parallel.launch import Ranks


@pytest.fixture(scope="session")
def pair():
    """This process and another one; at most one engine runs on them at a time."""
    helpers = str(Path(__file__).resolve().parents[1] / "helpers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")])]))
        ranks = Ranks.start(2)
    yield ranks
    ranks.close()
