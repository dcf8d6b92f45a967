"""All steps of a flow: one file of this folder an entry, found by its record."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ...spec.records import records_in
from .step import FlowStep


@cache
def steps() -> Mapping[str, FlowStep]:
    """Find all steps by name, in the order of the chain.

    Raises:
        ValueError: two records have one name.
    """
    found = records_in(__package__, FlowStep, "steps of a flow")
    return {each.name: each for each in sorted(found.values(), key=lambda each: each.place)}
