"""Find the format of a trace, and read it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from .asked import Asked
from .azure import COLUMNS, read_azure
from .json_lines import read_lines
from .load_log import read_log
from .servegen import read_servegen


def read_trace(path: Path, *, limit: int | None = None, start: float | None = None, seed: int | str = 0) -> list[Asked]:
    """Read a trace: a CSV file of Azure's, a folder of ServeGen's, a file of JSON lines (ours or Mooncake's), or what
    ``bench serve --json`` wrote.

    Args:
        limit: most requests to read.
        start: seconds from the beginning of the trace at which to begin.
        seed: decides what ServeGen's distributions give.

    Raises:
        ValueError: it is none of these, or holds no request.
    """
    if path.is_dir():
        found = read_servegen(path, start=start, seed=seed)
        return found[:limit]
    try:
        with path.open() as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if first.strip().split(",")[:1] == [COLUMNS[0]]:
        found = read_azure(path)
    elif (logged := _logged(path, first)) is not None:
        found = read_log(logged, path)
    else:
        found = read_lines(path)
    if start:
        found = [each for each in found if each.at >= start]
        if not found:
            raise ValueError(f"{path} has no request from second {start:g} on: lower the start")
        began = found[0].at
        found = [replace(each, at=each.at - began) for each in found]
    return found[:limit]


def _logged(path: Path, first: str) -> dict[str, object] | None:
    """Parse the file if it is one JSON object with requests in it; else None."""
    if first.strip() != "{":
        return None
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is neither JSON nor JSON lines ({error})") from None
    return found if isinstance(found, dict) and "requests" in found else None
