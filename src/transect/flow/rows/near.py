r"""Near-duplicates by MinHash and locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman, Ullman, chapter 3).

A text is the set of its 5-byte shingles, after case, marks and spaces are evened out. For a random order of all
shingles, two texts have the same smallest one with the probability of their Jaccard similarity J = |A n B| / |A u B|. A
signature is the smallest shingle in each of 128 orders. Its bands of r values are buckets: texts with similarity J
share at least one of b buckets with the probability 1 - (1 - J^r)^b. Texts that share one are then compared exactly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

ORDERS = 128
WIDTH = 5
MOST_COMPARED = 16
"""Texts of a bucket that a further one is compared with."""

Shingles = NDArray[np.uint64]


def normalized(text: str) -> str:
    """Return a text in small letters, with words and numbers separated by single spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def shingles(text: str) -> Shingles:
    """Return the sorted set of a text's shingles, as numbers."""
    content = np.frombuffer(normalized(text).encode().ljust(WIDTH), np.uint8).astype(np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(content, WIDTH)
    weights = np.uint64(256) ** np.arange(WIDTH, dtype=np.uint64)
    return np.unique(windows @ weights)


def similarity(one: Shingles, other: Shingles) -> float:
    """Return the Jaccard similarity of two sets of shingles."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def signature(found: Shingles) -> NDArray[np.uint64]:
    """Return the smallest shingle in each of ``ORDERS`` orders, as the orders' numbers."""
    with np.errstate(over="ignore"):
        return ((_mixed(found)[:, None] * _FACTORS + _OFFSETS) >> np.uint64(32)).min(axis=0)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread values over all 64 bits (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_FACTORS, _OFFSETS = np.random.default_rng(1).integers(1, 2**64, (2, ORDERS), dtype=np.uint64)
_FACTORS |= np.uint64(1)


def rows_per_band(threshold: float) -> int:
    """Return the size of a band such that pairs at the threshold share a bucket with at least 99% probability."""
    for rows in (16, 8, 4, 2):
        if 1 - (1 - threshold**rows) ** (ORDERS // rows) >= 0.99:
            return rows
    return 1


def near_pairs(texts: Sequence[str], threshold: float) -> Iterator[tuple[int, int, float]]:
    """Yield (earlier index, later index, similarity) of texts that are alike; of many alike ones, each at least with
    one.

    Args:
        threshold: smallest Jaccard similarity.
    """
    sets = [shingles(text) for text in texts]
    rows = rows_per_band(threshold)
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for index, found in enumerate(sets):
        bands = signature(found).reshape(-1, rows)
        compared: set[int] = set()
        for band, values in enumerate(bands):
            members = buckets[band, values.tobytes()]
            alike = False
            for other in members:
                if other not in compared:
                    compared.add(other)
                    value = similarity(sets[other], found)
                    if value >= threshold:
                        alike = True
                        yield other, index, value
            if not alike and len(members) < MOST_COMPARED:
                members.append(index)


def clusters(count: int, pairs: Iterator[tuple[int, int]]) -> list[int]:
    """Return for each of ``count`` items the smallest index that pairs connect it with."""
    parent = list(range(count))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for one, other in pairs:
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    return [root(index) for index in range(count)]
