"""Exact checks of answers: one line of JSON with the country of the question and the fact that was asked for."""

import json
from collections.abc import Mapping
from typing import Any


def is_form(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer is JSON with the keys of the row's answer, texts as values, and the right country."""
    try:
        found = json.loads(answer)
    except ValueError:
        return 0.0
    right = json.loads(record["answer"])
    form = isinstance(found, dict) and found.keys() == right.keys() and all(isinstance(v, str) for v in found.values())
    return float(form and found["country"] == right["country"])
