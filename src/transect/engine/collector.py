"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import atexit
import gc


def keep_from_collector() -> None:
    """Take all that a process has after its start out of what the garbage collector looks at.

    A full collection walks over every object of the libraries that are loaded, for tenths of a second, in which no
    request moves. What is made from now on is collected as ever. When the process ends the collector gets it all back:
    Triton 3.9 calls a leak, on standard error, whatever of its own is still there after the last collection.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
