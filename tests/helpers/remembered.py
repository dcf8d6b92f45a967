"""What a compiler said, kept from one run of the tests to the next.

The answer depends on the inputs alone, so it need not be computed twice: the key is a hash of all of them (sources,
options, compiler version). It is kept in the user's cache, where other clones find it. ``--prove`` computes all anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from effort import proving

from transect.hardware.cache import cache_folder


class Remembered:
    """``remembered(make, *inputs)`` is ``make()``, or what it returned when the inputs were the same; JSON values."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_folder() / "tests" if folder is None else folder

    def __call__(self, make: Callable[[], Any], *inputs: str | bytes) -> Any:
        digest = hashlib.sha256()
        for part in inputs:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)
        file = self._folder / f"{digest.hexdigest()}.json"
        if not proving() and file.exists():
            return json.loads(file.read_text())
        made = make()
        self._folder.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(made))
        new.replace(file)  # at once, for other processes
        return made
