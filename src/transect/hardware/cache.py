"""The folder of measurements and builds of this package on a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$TRANSECT_CACHE``, or ``transect`` in the user's cache directory."""
    explicit = os.environ.get("TRANSECT_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transect"
