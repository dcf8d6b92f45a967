"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import atexit
import gc
import sys

QUIET = (3, 7)
"""Newest Triton version that prints no leaks when a process ends; 3.9 reports objects kept from the collector as
leaks."""


def keep_from_collector() -> None:
    """Exclude all objects of a started process from garbage collection.

    A full collection walks over every object of the libraries that are loaded, for tenths of a second, in which no
    request moves. What is made from now on is collected as ever.
    """
    gc.collect()
    gc.freeze()
    atexit.register(_give_back)


def _give_back() -> None:
    """Return all objects to the last collection, if Triton would report leaks otherwise; this takes 0.3 s."""
    version = getattr(sys.modules.get("triton"), "__version__", "0").split(".")
    if tuple(int(part) for part in version[:2] if part.isdecimal()) > QUIET:
        gc.unfreeze()
