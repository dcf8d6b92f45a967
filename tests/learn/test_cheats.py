"""Ways around an exercise are caught: the program is not graded, or it is not right."""

from __future__ import annotations

from pathlib import Path

import pytest
from effort import quick_first
from learn_cheats import CHEATS, HONEST

from transect.costs.ceilings import Ceilings
from transect.learn.grade import workshop
from transect.learn.grade.grader import grade
from transect.learn.registry import get

SLOW = {"waits for ever", "remembers by shape", "one buffer for all results"}


@pytest.mark.parametrize(
    ("rung", "how", "words", "program"), quick_first(CHEATS, [each for each in CHEATS if each[1] not in SLOW])
)
def test_a_cheat_is_caught(graded, monkeypatch, rung: str, how: str, words: str, program: str) -> None:
    monkeypatch.setattr(workshop, "TIMEOUT_S", 5.0 if how == "waits for ever" else 60.0)
    verdict = graded(get(rung), program)
    assert not verdict.right
    assert words in " ".join((verdict.reason, *verdict.cheats, verdict.detail)), verdict


def test_the_honest_program_beside_the_cheats_is_right(graded) -> None:
    verdict = graded(get("vector_add"), HONEST.replace("def honest", "def add"))
    assert verdict.right, (verdict.reason, verdict.detail, verdict.cheats)


def test_a_time_below_the_floor_is_not_believed(graded) -> None:
    """A machine that is said to be slow makes the honest solution look too fast."""
    rung = get("adamw")
    crawling = Ceilings("none", 1.0, 1.0, {"float32": 1.0})
    verdict = graded(rung, rung.solution, ceilings=lambda: crawling)
    assert not verdict.right and "at the least" in verdict.reason
    endless = Ceilings("none", 1e30, 1e30, {"float32": 1e30})
    verdict = graded(rung, rung.solution, ceilings=lambda: endless)
    assert verdict.right and verdict.floor_seconds is not None and verdict.percent is not None


def test_a_child_is_told_no_answer_and_no_secret(monkeypatch, tmp_path: Path) -> None:
    """Neither the grader's answers nor the shell's secrets are in the process that runs a program."""
    monkeypatch.setenv("SOME_TOKEN", "secret")
    path = tmp_path / "line.py"
    path.write_text(
        "import os\nimport sys\n\n\ndef gradient(a, b, xs, ys):\n"
        "    found = [name for name in sys.modules if name.startswith('transect')]\n"
        "    raise ValueError(f'{found} {os.environ.get(\"SOME_TOKEN\")}')\n"
    )
    with workshop.Workshop() as fresh:
        verdict = grade(get("line"), path, shop=fresh)
    assert "[] None" in verdict.detail
