"""What a compiler said, kept from one run of the tests to the next.

The answer depends on the inputs alone, so it need not be computed twice: the key is a hash of all of them (sources,
options, compiler version). ``--prove`` computes everything anew, ``--cache-clear`` forgets it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from effort import proving


class Remembered:
    """``remembered(make, *inputs)`` is ``make()``, or what it returned when the inputs were the same; JSON values."""

    def __init__(self, config: pytest.Config) -> None:
        self._cache = getattr(config, "cache", None)

    def __call__(self, make: Callable[[], Any], *inputs: str | bytes) -> Any:
        digest = hashlib.sha256()
        for part in inputs:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)
        key = f"transect/{digest.hexdigest()}"
        if self._cache is None:
            return make()
        if not proving() and (found := self._cache.get(key, None)) is not None:
            return found
        made = make()
        self._cache.set(key, made)
        return made
