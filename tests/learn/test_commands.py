"""The commands of ``transect learn``: a walk as a beginner would make it, a class, a portfolio, a new rung."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from commands import run_here
from effort import quick_first

from transect.learn.classroom import Graded, grade_class, students, table
from transect.learn.grade import sandbox
from transect.learn.grade.grader import grade
from transect.learn.grade.verdict import Verdict
from transect.learn.portfolio import page
from transect.learn.progress import climbed
from transect.learn.record import Rung
from transect.learn.registry import get
from transect.learn.template import rung_of
from transect.learn.template_sources import SOURCES
from transect.learn.texts import with_hole
from transect.ops.registry import all_ops


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_beginner_starts_fails_solves_and_goes_on(own_cache: Path) -> None:
    folder = str(own_cache / "line")
    assert "next: transect learn start line" in run_here("learn", "list").stdout
    assert "read" in run_here("learn", "start", "line", "--dir", folder).stdout
    wrong = run_here("learn", "check", "line", "--dir", folder)
    assert wrong.returncode == 1 and "the hole is still open" in wrong.stdout
    refused = run_here("learn", "start", "line", "--dir", folder, "--solution")
    assert refused.returncode == 2 and "--force" in refused.stderr
    run_here("learn", "start", "line", "--dir", folder, "--solution", "--force")
    right = run_here("learn", "check", "line", "--dir", folder)
    assert right.returncode == 0 and "unlocked: xor" in right.stdout, right.stdout
    rows = {row["name"]: row["state"] for row in json.loads(run_here("learn", "list", "--json").stdout)}
    assert rows["line"] == "done" and rows["xor"] == "open" and rows["scheduler"] == "later"
    assert "is the shipped solution" in run_here("learn", "show", "line", "--dir", folder).stdout
    html = own_cache / "portfolio.html"
    assert run_here("learn", "report", "-o", str(html)).returncode == 0
    text = html.read_text()
    assert "Fit a line" in text and "def gradient" in text and page(climbed()) == text
    assert "<script" not in text and "http" not in text


def test_errors_say_what_to_do(own_cache: Path) -> None:
    assert "transect learn start" in run_here("learn", "check", "line", "--dir", str(own_cache)).stderr
    assert "nothing is solved yet" in run_here("learn", "report").stderr
    assert "no rung 'lime'" in run_here("learn", "show", "lime").stderr
    run_here("learn", "start", "line", "--dir", str(own_cache))
    assert "line has no place inside a command" in run_here("learn", "use", "line", "--dir", str(own_cache)).stderr


@pytest.mark.skipif(bool(sandbox.refusal()), reason="this system lets no user make namespaces")
def test_a_class_is_graded_in_a_sandbox(tmp_path: Path) -> None:
    """A stranger's program has no network, sees no other submission and leaves nothing behind."""
    rung = get("line")
    outside = tmp_path / "left_behind"
    spy = f"""
import os
import socket
found = []
try:
    open({str(outside)!r}, "w")
    found.append("wrote")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError as error:
    found.append(type(error).__name__ + str(error.errno))
found.append(os.path.exists({str(tmp_path / "good")!r}))
found.append([line for line in open("/proc/self/status") if line.startswith("CapEff")][0].split()[1])
raise ValueError(str(found))
"""
    for name, text in (("good", rung.solution), ("spy", spy)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "line.py").write_text(text)
    made = {each.student: each.verdict for each in grade_class(rung, tmp_path)}
    assert made["good"].right and not made["spy"].right
    assert "wrote" not in made["spy"].reason and "0000000000000000" in made["spy"].reason
    assert not outside.exists()
    text = table(rung, [Graded(name, verdict) for name, verdict in made.items()])
    assert "| good | right |" in text and "| spy |" in text


def test_without_a_sandbox_strangers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "refusal", lambda: "programs of strangers run in a sandbox alone")
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "line.py").write_text("")
    with pytest.raises(ValueError, match="in a sandbox alone"):
        list(grade_class(get("line"), tmp_path))
    with pytest.raises(ValueError, match="a folder of its own"):
        students(get("xor"), tmp_path)
    wrong = [Graded(name, Verdict("line", False, "a|b")) for name in "bc"]
    wrong.append(Graded("d", Verdict("line", False, "why", detail="one step: line 3: NameError", stopped=True)))
    text = table(get("line"), wrong)
    assert "| b |" in text and "| a\\|b | 2 |" in text and "stops with an error: one step: line 3" in text


NEW = [*SOURCES, "objective:next_token", *(f"operator:{op.name}" for op in all_ops())]


@pytest.mark.parametrize("name", quick_first(NEW, ["objective:distill", "operator:kv_cache_write"]))
def test_a_new_rung_grades_its_own_reference_right(shop, tmp_path: Path, name: str) -> None:
    """From every operator of the registry and every objective; ``test_policies.py`` has the policies."""
    file = tmp_path / "mine.py"
    file.write_text(rung_of(name))
    rung = runpy.run_path(str(file))["RUNG"]
    assert isinstance(rung, Rung) and len(rung.holes) >= 1
    path = tmp_path / rung.file
    path.write_text(rung.solution)
    verdict = grade(rung, path, shop=shop)
    assert verdict.right, (verdict.reason, verdict.detail, verdict.cheats)
    path.write_text(with_hole(rung.solution, rung.holes))
    assert "hole is still open" in grade(rung, path, shop=shop).reason


def test_a_teacher_makes_a_rung_that_students_climb(own_cache: Path) -> None:
    """The file of ``learn new`` is started and checked like a rung of the ladder, and grades a class."""
    file, folder = str(own_cache / "mine.py"), own_cache / "class" / "anna"
    assert run_here("learn", "new", "swiglu", "-o", file).returncode == 0
    assert run_here("learn", "start", file, "--dir", str(folder)).returncode == 0
    assert f"transect learn check {file} --dir ." in (folder / "README.md").read_text()
    run_here("learn", "start", file, "--dir", str(folder), "--solution", "--force")
    right = run_here("learn", "check", file, "--dir", str(folder))
    assert right.returncode == 0 and "right: example 0" in right.stdout, right.stdout + right.stderr
    run_here("learn", "report", "-o", str(own_cache / "portfolio.html"))
    assert "Rungs of a teacher" in (own_cache / "portfolio.html").read_text()
    assert "is not there" in run_here("learn", "show", "gone.py").stderr
    (own_cache / "empty.py").write_text("")
    assert "has no RUNG" in run_here("learn", "show", str(own_cache / "empty.py")).stderr


def test_a_new_rung_from_nothing_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "mine.py")
    assert "there are eviction, admission" in run_here("learn", "new", "--from", "policy:none", "-o", out).stderr
    assert "cannot become a rung" in run_here("learn", "new", "--from", "cake:order", "-o", out).stderr
    assert "--from policy:order" in run_here("learn", "new", "-o", out).stderr
