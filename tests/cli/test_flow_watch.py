"""``transect flow watch``, ``feedback`` and ``captures`` over a directory of captures."""

import json

import pytest
from commands import run_here

from transect.flow.watch.captures import CaptureFiles


@pytest.fixture
def folder(tmp_path):
    files = CaptureFiles(tmp_path / "captures", reserve_bytes=0)
    for number in range(1, 41):
        answers = [{"choice": 0, "text": f"It is {number}"}]
        request = {"kind": "request", "id": f"{number:032x}", "time": float(number), "model": "m", "answers": answers}
        asked = {"messages": [{"role": "user", "content": f"Say {number}"}], "user": files.user_hash(f"user {number}")}
        said = {"kind": "feedback", "id": f"{number:032x}", "choice": 0, "model": "m", "correction": f"{number}!"}
        files.append([json.dumps(each).encode() for each in (request | asked, said | {"user": asked["user"]})])
    return files.folder


def reference(tmp_path, text):
    path = tmp_path / "reference.jsonl"
    rows = [{"question": f"Say {number}", "answer": text.format(number)} for number in range(1, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_watch_exits_with_3_if_it_raises_an_alarm(tmp_path, folder):
    quiet = run_here(
        *("flow", "watch", str(folder), "--model", "none", "--reference", reference(tmp_path, "It is {}"), "--json")
    )
    assert quiet.returncode == 0 and json.loads(quiet.stdout)["alarms"] == []
    loud = run_here(
        *("flow", "watch", str(folder), "--model", "none", "--reference", reference(tmp_path, "The number is {}, sir"))
    )
    assert loud.returncode == 3 and "AnswerLengthDrift" in loud.stdout
    few = run_here("flow", "watch", str(folder), "--model", "none", "--reference", str(folder), "--window", "8")
    assert few.returncode == 2 and "at least 16" in few.stderr


def test_feedback_is_written_as_rows(tmp_path, folder):
    for kind, count in (("pairs", 40), ("labels", 80)):
        done = run_here("flow", "feedback", str(folder), "--out", str(tmp_path / "rows.jsonl"), "--kind", kind)
        assert done.returncode == 0 and len((tmp_path / "rows.jsonl").read_text().splitlines()) == count
    none = run_here("flow", "feedback", str(folder), "--out", str(tmp_path / "rows.jsonl"), "--version", "other")
    assert none.returncode == 1


def test_captures_are_counted_and_deleted_by_user(folder):
    assert "m: 40 x feedback\nm: 40 x request\n80 records" in run_here("flow", "captures", str(folder)).stdout
    assert "deleted 2 records" in run_here("flow", "captures", str(folder), "--delete-user", "user 7").stdout
    assert "78 records" in run_here("flow", "captures", str(folder)).stdout
    assert run_here("flow", "captures", str(folder / "none")).returncode == 2
    assert run_here("flow", "captures", str(folder), "--client", "key-1").returncode == 2
