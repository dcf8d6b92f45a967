"""One workshop for all tests of a process: it has torch loaded, and forks a child for each program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transect.learn.grade import workshop
from transect.learn.grade.grader import grade
from transect.learn.grade.verdict import Verdict
from transect.learn.record import Rung


@pytest.fixture(scope="session")
def shop() -> Iterator[workshop.Workshop]:
    with workshop.Workshop() as made:
        yield made


@pytest.fixture
def graded(shop: workshop.Workshop, tmp_path: Path) -> Callable[[Rung, str], Verdict]:
    """Grades a text as the program of a rung."""

    def run(rung: Rung, text: str, **options) -> Verdict:
        path = tmp_path / rung.file
        path.write_text(text)
        return grade(rung, path, shop=shop, **options)

    return run
