"""Results of ``transect bench serve --json`` as a trace: the same arrivals and lengths again, with other tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .asked import Asked, from_start


def read_log(found: dict[str, Any], path: Path) -> list[Asked]:
    """Read the requests of such a file, which has been parsed.

    Raises:
        ValueError: it has several levels of load, or a request lacks a figure.
    """
    loads = sorted({str(each.get("load")) for each in found["requests"]})
    if len(loads) > 1:
        raise ValueError(f"{path} has the levels {', '.join(loads)}: a trace is one level, so measure it alone")
    try:
        asked = [
            Asked(float(each["due"]), int(each["input_tokens"]), int(each["output_tokens"]))
            for each in found["requests"]
            if each["input_tokens"] and each["output_tokens"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a request without {error}: this is not what bench serve --json writes") from None
    return from_start(asked, path)
