"""Every rung: its shipped solution is right, its hole is open, and known mistakes are told apart with their reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from effort import proving, quick_first

from transect.learn.folder import page, write
from transect.learn.grade.grader import grade, source_file
from transect.learn.record import ROADS
from transect.learn.registry import all_rungs, get, unlocks
from transect.learn.texts import OPEN, PACKAGE, with_hole

MISTAKES = json.loads((Path(__file__).parents[1] / "data" / "learn_mistakes.json").read_text())
EACH = [(rung, each["name"]) for rung, found in MISTAKES.items() for each in found]
LONG = ("autoscaler", "digits", "flash_attention", "matmul_naive", "matmul_tiled", "router")
"""Rungs that take seconds: they and their mistakes run with ``--prove``."""
SLOW = ("line", "python_to_cpp", "sampler", "vector_add")
"""Rungs of each kind, which ``make test`` times as well, with their slow solutions; of others it counts the work."""
QUICK = [
    (rung, each)
    for rung, each in EACH
    if rung not in LONG and (each == MISTAKES[rung][1]["name"] or (each == "slow" and rung in SLOW))
]


@pytest.mark.parametrize("name", quick_first(all_rungs(), [name for name in all_rungs() if name not in LONG]))
def test_the_shipped_solution_is_right_and_not_slow(graded, name: str) -> None:
    rung = get(name)
    for _ in range(10 if proving() else 1):
        verdict = graded(rung, rung.solution, measure=proving() or name in SLOW)
        assert verdict.right and not verdict.cheats, (verdict.reason, verdict.detail, verdict.cheats)
        assert not verdict.slow or rung.kind == "cpp", verdict.reason  # C++ may be slow by the clock, too
        assert verdict.passed == [case.name for case in rung.cases]


@pytest.mark.parametrize(("name", "mistake"), quick_first(EACH, QUICK))
def test_a_mistake_is_told_with_the_reason_that_a_teacher_would_give(graded, name: str, mistake: str) -> None:
    rung = get(name)
    (entry,) = [each for each in MISTAKES[name] if each["name"] == mistake]
    assert rung.solution.count(entry["old"]) >= 1
    text = rung.solution.replace(entry["old"], entry["new"], 1)
    verdict = graded(rung, text, measure=proving() or mistake == "slow")
    assert verdict.right == (mistake == "slow"), (verdict.reason, verdict.detail)
    assert verdict.slow == (mistake == "slow")
    assert verdict.reason.startswith(entry["says"]), (verdict.reason, verdict.detail)


def test_every_rung_has_three_wrong_solutions_and_a_slow_one() -> None:
    for name, rung in all_rungs().items():
        names = [each["name"] for each in MISTAKES[name]]
        assert len([each for each in names if each != "slow"]) >= 3, name
        assert "slow" in names or rung.kind == "dialogue", name


@pytest.mark.parametrize("road", ROADS)
def test_an_open_hole_is_named_as_that(graded, road: str) -> None:
    rung = next(rung for rung in all_rungs().values() if rung.road == road and rung.kind != "cpp")
    verdict = graded(rung, with_hole(rung.solution, rung.holes))
    assert not verdict.right and "hole is still open" in verdict.reason


def test_the_ladder_is_long_enough_and_can_be_climbed_in_its_order() -> None:
    rungs = all_rungs()
    assert len(rungs) >= 24 and {rung.road for rung in rungs.values()} == set(ROADS)
    seen: set[str] = set()
    for name, rung in rungs.items():
        assert set(rung.after) <= seen, f"{name} comes before {set(rung.after) - seen}"
        assert len(rung.page) > 600 and len(rung.hints) >= 3 and rung.minutes <= 120
        assert not rung.shipped or (PACKAGE / rung.shipped).is_file(), name
        seen.add(name)
    assert unlocks("line") and get("line").title
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        get("softmx")


@pytest.mark.parametrize("name", list(all_rungs()))
def test_the_folder_has_a_program_with_a_hole_and_no_solution(tmp_path: Path, name: str) -> None:
    rung = get(name)
    files = write(rung, tmp_path)
    program = files[0].read_text()
    assert "your turn" in program and program != rung.solution
    assert OPEN not in program
    if rung.kind != "cpp":
        compile(program, rung.file, "exec")
    for hole in rung.holes:
        assert f"def {hole.rpartition('.')[2]}(" in program
    assert (tmp_path / "hints" / "1.txt").read_text().strip() == rung.hints[0]
    assert rung.title in page(rung) and "transect learn check" in (tmp_path / "README.md").read_text()
    with pytest.raises(ValueError, match="--force"):
        write(rung, tmp_path)
    write(rung, tmp_path, solution=True, force=True)
    assert files[0].read_text() == rung.solution


def test_two_checks_draw_different_inputs(shop) -> None:
    rung = get("line")
    import numpy as np

    a, b = (rung.cases[1].make(np.random.default_rng()) for _ in range(2))
    assert a != b
    with source_file(rung) as path:
        assert grade(rung, path, shop=shop, seed=1).right


@pytest.mark.prove
def test_a_kernel_is_compiled_ahead_of_time(tmp_path: Path) -> None:
    write(get("vector_add"), tmp_path, solution=True)
    command = [sys.executable, "-m", "transect", "learn", "check", "vector_add", "--dir", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert kernel["target"] == "sm_90" and kernel["loads"] == {"16": 4}


def test_a_program_that_cannot_be_counted_is_judged_by_the_clock(graded) -> None:
    """Functions for atomics are missing where loads and stores are counted."""
    rung = get("python_to_cpp")
    atomic = rung.solution.replace("#include <cmath>", "#include <atomic>\n#include <cmath>").replace(
        "        y[i] =", "        static std::atomic<int> calls; ++calls;\n        y[i] ="
    )
    verdict = graded(rung, atomic)
    assert verdict.right and not verdict.count and verdict.seconds, (verdict.reason, verdict.detail)
