"""Two ways to run the tests: quick (``make test``) and with everything in them (``make prove``).

``make test`` meets every behaviour at least once. ``make prove`` adds the cross products, the long random searches and
the slow machinery: tests marked ``prove``, and more examples for tests that draw them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

PROVE = "TRANSECT_TEST_PROVE"
"""The environment variable that ``--prove`` sets, because test modules ask while they are imported."""


def proving() -> bool:
    """Whether everything is to run."""
    return os.environ.get(PROVE) == "1"


def examples(quick: int, prove: int, **options: Any) -> settings:
    """Hypothesis settings with so many examples; ``options`` are further ones of ``hypothesis.settings``."""
    return settings(max_examples=prove if proving() else quick, **options)


def quick_first(cases: Iterable[Any], quick: int | Iterable[Any]) -> list[Any]:
    """``cases`` for ``parametrize``, all of them but ``quick`` marked ``prove``.

    ``quick`` is how many of the first cases, or the cases themselves. A case is a value, or a tuple of values for
    several arguments.

    Raises:
        ValueError: one of ``quick`` is no case.
    """
    cases = list(cases)
    chosen = cases[:quick] if isinstance(quick, int) else list(quick)
    if unknown := [case for case in chosen if case not in cases]:
        raise ValueError(f"not among the cases: {unknown}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in chosen else [pytest.mark.prove]
        )
        for case in cases
    ]
