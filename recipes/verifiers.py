"""Verifiers for ``recipes/grpo.toml``: what an answer to a sum is worth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def correct(answer: str, record: Mapping[str, Any]) -> float:
    """1 where the last number of the answer is the right one."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and numbers[-1] == record["answer"])


def alone(answer: str, record: Mapping[str, Any]) -> float | None:
    """1 for a number and nothing else; an answer without any number is for ``correct`` to judge."""
    if not re.search(r"\d", answer):
        return None
    return float(re.fullmatch(r"\s*-?\d+\s*", answer) is not None)
