"""Two ranks that share many engines: a second process takes seconds to start."""

import pytest

from transect.parallel.launch import Ranks


@pytest.fixture(scope="session")
def pair():
    """This process and another one; at most one engine runs on them at a time."""
    ranks = Ranks.start(2)
    yield ranks
    ranks.close()
