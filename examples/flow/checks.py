"""Exact checks of answers: one line of JSON with the country of the question."""

import json
from collections.abc import Mapping
from typing import Any


def is_form(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer is JSON with two texts, ``country`` and ``capital``, and the country is the right one."""
    try:
        found = json.loads(answer)
    except ValueError:
        return 0.0
    right = json.loads(record["answer"])["country"]
    form = isinstance(found, dict) and found.keys() == {"country", "capital"}
    return float(form and isinstance(found["capital"], str) and found["country"] == right)
