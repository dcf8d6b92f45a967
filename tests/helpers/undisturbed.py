"""Repeat what other work on the machine may disturb."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def undisturbed(measure: Callable[[], T], holds: Callable[[T], object], tries: int = 5) -> T:
    """Measure until ``holds(result)``, and return the last result, for the caller to assert on.

    For claims about times, and for signals that must come before something ends: a busy machine disturbs one
    measurement, but not ``tries`` of them.
    """
    for _ in range(tries - 1):
        if holds(found := measure()):
            return found
    return measure()
