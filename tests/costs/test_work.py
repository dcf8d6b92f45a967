"""Counts of visible pairs and keys against counting them one by one."""

from __future__ import annotations

import pytest

from transect.costs.work import visible_keys, visible_pairs


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("new", "length"), [(1, 1), (1, 9), (6, 6), (4, 9), (9, 30)])
def test_against_enumeration(new: int, length: int, window: int | None) -> None:
    seen = [set(range(max(0, i + 1 - (window or length)), i + 1)) for i in range(length - new, length)]
    assert visible_pairs(new, length, window) == sum(map(len, seen))
    assert visible_keys(new, length, window) == len(set.union(*seen))
