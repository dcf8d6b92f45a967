"""Traces of Azure/AzurePublicDataset (AzureLLMInferenceTrace, 2023 and 2024): CSV with ``TIMESTAMP``, ``ContextTokens``
and ``GeneratedTokens``. Prompts share nothing that the trace tells."""

from __future__ import annotations

import csv
import re
from datetime import datetime
from pathlib import Path

from .asked import Asked, from_start

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path) -> list[Asked]:
    """Read such a file; a length of 0 is read as 1.

    Raises:
        ValueError: a line is none of such a trace; the message has its number.
    """
    found = []
    with path.open(newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                stamp, prompt, output = (line[name] for name in COLUMNS)
                found.append(Asked(_seconds(stamp), max(1, int(prompt)), max(1, int(output))))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}: a line has {', '.join(COLUMNS)}") from None
    return from_start(found, path)


def _seconds(stamp: str) -> float:
    """Read a time stamp, whose fractions have more digits than Python keeps."""
    whole, fraction, zone = re.fullmatch(r"([^.+]+)(\.\d+)?(\+.*)?", stamp.strip()).groups()  # type: ignore[union-attr]
    return datetime.fromisoformat(whole + (zone or "+00:00")).timestamp() + float(fraction or 0)
