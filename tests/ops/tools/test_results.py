"""Rows of a result file know the run that they come from."""

from pathlib import Path
from typing import Any

import pytest

from transect.ops.tools import results
from transect.ops.tools.bench import Timing


def _run(device: str, version: str, commit: str) -> dict[str, Any]:
    return {"device": {"name": device}, "environment": {"packages": {"torch": version}, "commit": commit}}


@pytest.mark.parametrize(
    ("device", "version", "commit", "same"),
    [("a", "1", "x", True), ("b", "1", "x", False), ("a", "2", "x", False), ("a", "1", "y", False)],
)
def test_a_run_goes_on_where_the_same_commit_was_measured(
    tmp_path: Path, device: str, version: str, commit: str, same: bool
) -> None:
    path = tmp_path / "ops.json"
    rows = [Timing("sum", case, "forward", "triton", False, seconds=1.0) for case in ("one", "two")]
    results.merge(path, _run("a", "1", "x"), rows)
    results.merge(path, _run("a", "1", "w"), [Timing("dot", "one", "forward", "triton", False)])
    found = results.measured(results.read(path), _run(device, version, commit))
    assert found == (frozenset({("sum", "one"), ("sum", "two")}) if same else frozenset())


def test_measuring_again_replaces_rows_and_keeps_the_commit_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    results.merge(path, _run("a", "1", "x"), [Timing("sum", "one", "forward", "triton", False, seconds=1.0)])
    results.merge(path, _run("a", "1", "x"), [Timing("dot", "one", "forward", "triton", False, seconds=1.0)])
    results.merge(path, _run("a", "1", "y"), [Timing("dot", "one", "forward", "triton", False, seconds=2.0)])
    kept = results.read(path)
    commits = {row["op"]: kept["runs"][row["run"]]["environment"]["commit"] for row in kept["rows"]}
    assert commits == {"sum": "x", "dot": "y"}
    assert [row["seconds"] for row in kept["rows"]] == [2.0, 1.0]
