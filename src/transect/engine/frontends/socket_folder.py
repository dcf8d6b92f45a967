"""A private folder for the socket between two processes of one machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

LONGEST_PATH = 107
"""Longest path of a Unix socket on Linux, in bytes (``sun_path`` of unix(7), less the terminating byte)."""
NAME = "engine"


def make_socket_folder(places: Sequence[str] | None = None) -> Path:
    """Create a folder that only this user may enter, in which a socket called ``NAME`` has a path of legal length.

    Args:
        places: folders to try, in order; None for the folder of temporary files, ``$XDG_RUNTIME_DIR`` and /tmp.

    Raises:
        ValueError: none of the folders is usable; the message names them.
    """
    if places is None:
        places = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]
    reasons = []
    for place in dict.fromkeys(filter(None, places)):
        length = len(os.fsencode(f"{place}/transect-xxxxxxxx/{NAME}"))
        if length > LONGEST_PATH:
            shown = place if len(place) <= 60 else place[:57] + "..."
            reasons.append(f"{shown} gives a path of {length} bytes, and a socket's may have {LONGEST_PATH}")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="transect-", dir=place))
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
    raise ValueError(
        f"there is no folder for the engine's socket ({'; '.join(reasons)}): set TMPDIR to a short path that can be "
        "written to"
    )
