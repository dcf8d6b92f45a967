"""Cleaning and splitting of rows: duplicates, near-duplicates, overlap with benchmarks, splits without leaks."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .near import clusters, near_pairs, normalized
from .reading import DataRow

SHARED_WORDS = 13
"""Words in a row that a benchmark's question and a row may not share (Brown et al. 2020, appendix C)."""
MOST_SHOWN = 5
SPLITS = ("train", "validation", "test")


@dataclass(slots=True)
class DataFindings:
    """Findings in the data.

    Attributes:
        duplicates: rows equal to an earlier one, which are left out.
        near: rows that are nearly equal to another one.
        overlap: rows that overlap with a benchmark.
        conflicts: questions with several different answers.
        examples: first places of each finding.
    """

    duplicates: int = 0
    near: int = 0
    overlap: int = 0
    conflicts: int = 0
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def note(self, finding: str, text: str) -> None:
        """Keep the first examples of a finding."""
        if len(self.examples[finding]) < MOST_SHOWN:
            self.examples[finding].append(text)


def without_duplicates(rows: Sequence[DataRow], found: DataFindings) -> list[DataRow]:
    """Leave out rows equal to an earlier one, and count questions with several answers."""
    kept: dict[str, DataRow] = {}
    answers: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.id in kept:
            found.duplicates += 1
            found.note("duplicates", f"{row.place} equals {kept[row.id].place}")
            continue
        kept[row.id] = row
        question = normalized(row.prompt)
        answers[question].add(row.answer)
        if row.answer and len(answers[question]) == 2:
            found.conflicts += 1
            found.note("conflicts", f"{row.place}: an earlier row has another answer to this question")
    return list(kept.values())


def group_alike(rows: Sequence[DataRow], threshold: float, found: DataFindings) -> list[int]:
    """Return for each row the index of the first row of its group: rows with similar questions, or of the same
    ``group``, are connected."""

    def pairs() -> list[tuple[int, int]]:
        alike = []
        later = set()
        for one, other, value in near_pairs([row.prompt for row in rows], threshold):
            alike.append((one, other))
            if other not in later:
                later.add(other)
                found.note("near", f"{rows[other].place} is like {rows[one].place} (similarity {value:.2f})")
        found.near = len(later)
        first: dict[str, int] = {}
        for index, row in enumerate(rows):
            if row.group:
                alike.append((first.setdefault(row.group, index), index))
        return alike

    return clusters(len(rows), iter(pairs()))


def overlapping(rows: Sequence[DataRow], questions: Sequence[str], threshold: float, found: DataFindings) -> set[int]:
    """Return the indices of rows that overlap with a benchmark: a similar question, or the same 13 words in a row."""
    if not questions:
        return set()
    both = [*questions, *(row.prompt for row in rows)]
    hits = set()
    for one, other, value in near_pairs(both, threshold):
        if one < len(questions) <= other:
            hits.add(other - len(questions))
            place = rows[other - len(questions)].place
            found.note("overlap", f"{place} is like the benchmark's {questions[one]!r:.60} (similarity {value:.2f})")
    grams = {gram for question in questions for gram in _grams(question)}
    for index, row in enumerate(rows):
        if index not in hits and not grams.isdisjoint(_grams(f"{row.prompt} {row.answer}")):
            hits.add(index)
            found.note("overlap", f"{row.place} shares {SHARED_WORDS} words in a row with a benchmark")
    found.overlap = len(hits)
    return hits


def _grams(text: str) -> set[str]:
    words = normalized(text).split()
    return {" ".join(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


def split(rows: Sequence[DataRow], groups: Sequence[int], shares: tuple[float, float], seed: int) -> list[str]:
    """Return the split of each row: whole groups, by the hash of their first row, so that a row stays in its split when
    others are added.

    Args:
        shares: of validation and of test.

    Raises:
        ValueError: a split with a share, or the training split, has no row.
    """
    validation, test = shares
    place = {group: _unit(rows[group].id, seed) for group in set(groups)}
    lot = {
        group: "test" if value < test else "validation" if value < test + validation else "train"
        for group, value in place.items()
    }
    wanted = [name for name, share in (("train", 1.0), ("test", test), ("validation", validation)) if share > 0]
    sizes = Counter(lot.values())
    for name in wanted:
        if not sizes[name]:  # of few groups: the first ones of the largest split
            largest = max(sizes, key=lambda each: (sizes[each], each))
            if sizes[largest] < 2:
                raise ValueError(
                    f"data has {len(rows)} rows in {len(place)} groups of similar ones, too few for "
                    f"{', '.join(wanted)}: "
                    "add rows, raise data.near, or set data.validation_share or data.test_share to 0"
                )
            group = min((each for each in lot if lot[each] == largest), key=lambda each: place[each])
            lot[group] = name
            sizes = Counter(lot.values())
    return [lot[group] for group in groups]


def _unit(name: str, seed: int) -> float:
    """Return a number from 0 to 1 for a name, in a lot that ``seed`` numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") / 2**64
