"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import atexit
import gc
import sys

QUIET = (3, 7)
"""The newest Triton that is known to say nothing of what is left of it when a process ends; 3.9 calls that a leak."""


def keep_from_collector() -> None:
    """Take all that a process has after its start out of what the garbage collector looks at.

    A full collection walks over every object of the libraries that are loaded, for tenths of a second, in which no
    request moves. What is made from now on is collected as ever.
    """
    gc.collect()
    gc.freeze()
    atexit.register(_give_back)


def _give_back() -> None:
    """Let the last collection have everything again, where Triton would print its leaks otherwise; it takes 0.3 s."""
    version = getattr(sys.modules.get("triton"), "__version__", "0").split(".")
    if tuple(int(part) for part in version[:2] if part.isdecimal()) > QUIET:
        gc.unfreeze()
