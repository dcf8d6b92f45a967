"""Times a script without profiling, with the same random numbers each time."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator

import numpy as np
import torch

from .changes import NotPossible
from .script import Script

SEED = 0


def timed(script: Script) -> float:
    """Run a script until a GPU has done what it was asked for, and return the seconds; its output is dropped.

    Raises:
        NotPossible: it failed.
    """
    with (
        _same_chance(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        began = time.perf_counter()
        ending = script.run(show=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    if ending.interrupted:
        raise KeyboardInterrupt
    if ending.failed:
        raise ending.error if isinstance(ending.error, NotPossible) else NotPossible(ending.failed)
    return taken


@contextlib.contextmanager
def _same_chance() -> Iterator[None]:
    """Make a script that sets no seed draw the same numbers in every run, because runs are compared."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(arrays)
