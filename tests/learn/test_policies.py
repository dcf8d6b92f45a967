"""``learn new`` from every policy: the shipped one is right, a planted mistake and a slow program are told apart."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest
from commands import run_here
from effort import quick_first
from tiny_llm import save_tiny_llm

from transect.engine.scheduling.policies.registry import SCHEDULING, rules
from transect.learn.record import Rung
from transect.learn.registry import get
from transect.learn.template import rung_of
from transect.learn.template_policies import policies
from transect.learn.texts import PACKAGE, with_hole

MISTAKES = json.loads((Path(__file__).parents[1] / "data" / "learn_policy_mistakes.json").read_text())
QUICK = ["routing", "priority"]
RARE = ("filling", "model_speculation", "speculation")
"""Policies that decide a few times in a play."""


def made(name: str, folder: Path) -> Rung:
    file = folder / "mine.py"
    file.write_text(rung_of(f"policy:{name}"))
    rung = runpy.run_path(str(file))["RUNG"]
    assert isinstance(rung, Rung)
    return rung


def wasteful(text: str, holes: tuple[str, ...], rounds: int) -> str:
    """Put a loop that does nothing at the start of each function."""
    tree = ast.parse(text)
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for hole in holes:
        owner, _, name = hole.rpartition(".")
        place = next(each for each in named[owner].body if getattr(each, "name", "") == name) if owner else named[name]
        place.body = [*ast.parse(f"for _wasted in range({rounds}):\n    pass").body, *place.body]
    return ast.unparse(tree)


def test_every_policy_file_has_a_rule_and_every_rule_a_mistake() -> None:
    files = {path.stem for path in (SCHEDULING / "policies").glob("*.py")} - {"__init__", "registry"}
    covered = {module.rpartition(".")[2] for module, _ in rules().values()}
    assert files <= covered, f"no rule in {files - covered}"
    assert set(MISTAKES) == set(policies())
    page = (PACKAGE.parents[1] / "docs" / "learn" / "ladder.md").read_text()
    assert not [name for name in policies() if f"`{name}`" not in page]


@pytest.mark.parametrize("name", quick_first(policies(), QUICK))
def test_a_rung_from_a_policy_tells_right_wrong_and_slow(graded, tmp_path: Path, name: str) -> None:
    rung = made(name, tmp_path)
    verdict = graded(rung, rung.solution)
    assert verdict.right and not verdict.slow, (verdict.reason, verdict.detail, verdict.cheats)
    assert "hole is still open" in graded(rung, with_hole(rung.solution, rung.holes)).reason
    old, new = MISTAKES[name]
    assert rung.solution.count(old) == 1
    wrong = graded(rung, rung.solution.replace(old, new))
    assert not wrong.right and not wrong.cheats, wrong.lines()
    assert "decides otherwise" in wrong.reason and "decision" in wrong.detail, wrong.lines()
    slow = graded(rung, wasteful(rung.solution, rung.holes, 5000 if name in RARE else 400))
    assert slow.right and slow.slow and "lines" in slow.reason, slow.lines()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder, max_position_embeddings=1024)
    return str(folder)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["scheduler", *policies()])
def test_it_serves_the_eight_chats_of_the_demo(tmp_path: Path, model: str, name: str) -> None:
    """Or plays the planner's fleet; a policy that neither asks is refused with the reason."""
    rung = get(name) if name == "scheduler" else made(name, tmp_path)
    called = name if name == "scheduler" else str(tmp_path / "mine.py")
    (tmp_path / rung.file).write_text(rung.solution)
    done = run_here("learn", "use", called, "--dir", str(tmp_path), "--model", model, "--max-tokens", "40")
    if rung.live is None:
        assert rung.apart and rung.apart in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"your {rung.name} ran in" in done.stdout
    assert rung.live.runs == "fleet" or "8 chats" in done.stdout or "the server has stopped cleanly" in done.stdout
