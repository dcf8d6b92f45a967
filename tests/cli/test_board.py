"""``transect board``: what it finds at paths, and what it serves."""

import json
import subprocess
import sys

import httpx
import pytest
from commands import run_here

from transect.server.page.routes import POLICY

LINES = [
    {"kind": "step", "step": 1, "loss": float("nan"), "tokens_per_second": 10.0},
    {"kind": "step", "step": 2, "loss": 2.0, "tokens_per_second": 10.0},
]


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path / "runs"


def test_runs_and_reports_are_printed_as_json(runs, tmp_path):
    (tmp_path / "report.json").write_text('{"parts_s": {}, "findings": []}')
    done = run_here("board", str(runs), str(tmp_path / "report.json"), "--once")
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each["content"] for each in json.loads(done.stdout)}
    assert set(found) == {"a", "b", "report.json"} and found["report.json"]["findings"] == []
    assert [line["loss"] for line in found["a"]["steps"]] == [None, 2.0]  # JSON has no NaN


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.json", "not JSON", "is not JSON: name a run, a report"),
        ("log.jsonl", "{}", "is a log: name the directory of the run"),
        ("none.json", None, "cannot be read (No such file"),
        ("empty", None, "cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, name, text, problem):
    if text is not None:
        (tmp_path / name).write_text(text)
    done = run_here("board", str(tmp_path / name), "--once")
    assert done.returncode == 2 and problem in done.stderr


def test_the_board_serves_the_page_and_runs_as_they_grow(runs):
    words = [sys.executable, "-m", "transect", "board", str(runs / "a")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = process.stdout.readline()
            assert "1 report on http" in ready
            url = ready.split(" on ")[1].split("/#")[0]
            index = httpx.get(f"{url}/")
            assert '<meta name="transect-board" content="1">' in index.text
            assert index.headers["content-security-policy"] == POLICY
            assert httpx.get(f"{url}/page/page.js").status_code == 200
            assert len(httpx.get(f"{url}/board.json").json()[0]["content"]["steps"]) == 2
            with (runs / "a" / "log.jsonl").open("a") as file:
                file.write(json.dumps(LINES[1] | {"step": 3}) + "\n")
            assert len(httpx.get(f"{url}/board.json").json()[0]["content"]["steps"]) == 3
        finally:
            process.terminate()
