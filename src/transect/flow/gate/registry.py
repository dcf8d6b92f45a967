"""All measures of the gate: one file of this folder an entry, found by its record."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ...spec.records import records_in
from .measure import GateMeasure


@cache
def measures() -> Mapping[str, GateMeasure]:
    """Find all measures by name. Raises ValueError if two have one name."""
    return records_in(__package__, GateMeasure, "measures of the gate")


def measure_kind(name: object) -> GateMeasure:
    """Return the record of a measure. Raises ValueError if there is none of this name; the message lists them."""
    if name not in measures():
        raise ValueError(f"measure must be one of {', '.join(measures())}, not {name!r}")
    return measures()[str(name)]
