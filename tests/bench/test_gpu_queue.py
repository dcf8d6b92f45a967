"""``benchmarks/gpu_queue.py``: which work runs on which GPUs, and how it ends."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from undisturbed import undisturbed

from benchmarks import gpu_queue as queue_of_work

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_queue() -> ModuleType:
    return queue_of_work


def works(gpu_queue: ModuleType, *entries: dict[str, Any]) -> list[Any]:
    common = {"what": "", "asked": "", "wrong": "", "shown": "", "seconds": 60.0}
    return [gpu_queue.Work(**{**common, **each, "commands": tuple(each["commands"])}) for each in entries]


def run(gpu_queue: ModuleType, out: Path, gpus: list[str], seconds: float, *entries: dict[str, Any]) -> dict[str, Any]:
    made = gpu_queue.Queue(out, gpus, seconds)
    made.run(works(gpu_queue, *entries))
    assert json.loads((out / "queue.json").read_text())["work"] == made.ended
    return made.ended


def gone(pid: int) -> bool:
    """It ended; whoever is to ask for its exit code may not have done so."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_each_gets_gpus_of_its_own_and_a_folder(gpu_queue, tmp_path) -> None:
    tell = "echo gpus $CUDA_VISIBLE_DEVICES; python -c 'import transect' && echo found > \"$OUT/result\""
    ended = run(
        gpu_queue, tmp_path, ["3", "5"], 100,
        {"name": "one", "commands": [tell]},
        {"name": "two", "commands": [tell], "gpus": 2},
        {"name": "four", "commands": [tell], "gpus": 4},
        {"name": "wrong", "commands": ["false", tell]},
        {"name": "long", "commands": [tell], "seconds": 1000.0},
    )  # fmt: skip
    verdicts = {name: each["ended"] for name, each in ended.items()}
    assert verdicts == {
        "one": "done", "two": "done", "four": "needs 4 GPUs", "wrong": "failed", "long": "no time was left",
    }  # fmt: skip
    assert ended["wrong"]["codes"] == [1, 0]
    seen = {name: re.findall(r"^gpus (\S+)", (tmp_path / name / "log.txt").read_text(), re.MULTILINE) for name in ended
            if (tmp_path / name).exists()}  # fmt: skip
    assert seen["two"] == ["3,5"] and {*seen["one"], *seen["wrong"]} <= {"3", "5"} and "long" not in seen
    assert (tmp_path / "two" / "result").read_text() == "found\n"


def test_what_runs_over_its_time_is_ended_with_its_processes_and_the_next_runs(gpu_queue, tmp_path) -> None:
    lasting = f"{sys.executable} -c 'import time; time.sleep(600)'"
    command, child = f'{lasting} & echo $! > "$OUT/child"; wait', tmp_path / "lasts" / "child"

    def cut_off() -> dict[str, Any]:
        return run(
            gpu_queue, tmp_path, ["0"], 100,
            {"name": "lasts", "commands": [command, "echo never"], "seconds": 1.0},
            {"name": "next", "commands": ["true"]},
        )  # fmt: skip

    ended = undisturbed(cut_off, lambda _: child.exists() and child.read_text())
    assert ended["lasts"]["ended"] == "cut off" and ended["lasts"]["codes"] == [None, None]
    assert ended["next"]["ended"] == "done"
    assert "never" not in (tmp_path / "lasts" / "log.txt").read_text()
    assert gone(int(child.read_text()))


def test_an_interrupt_ends_what_runs(gpu_queue, tmp_path, monkeypatch) -> None:
    made = gpu_queue.Queue(tmp_path, ["0"], 100)
    begun = tmp_path / "slow" / "child"

    def interrupted(seconds: float) -> None:
        while not begun.exists() or not begun.read_text():
            made._changed.release()
            made._changed.acquire()
        raise KeyboardInterrupt

    monkeypatch.setattr(made._changed, "wait", interrupted)
    lasting = f"{sys.executable} -c 'import time; time.sleep(600)'"
    with pytest.raises(KeyboardInterrupt):
        made.run(works(gpu_queue, {"name": "slow", "commands": [f'{lasting} & echo $! > "$OUT/child"; wait', "true"]}))
    assert gone(int(begun.read_text()))


def test_entries_are_checked(gpu_queue, tmp_path) -> None:
    path = tmp_path / "queue.toml"
    path.write_text('[[work]]\nname = "a"\ncommands = []\n')
    with pytest.raises(ValueError, match=r"queue\.toml, a: .*what"):
        gpu_queue.queue(path)
    entry = 'name = "a"\nwhat = ""\nasked = ""\nwrong = ""\nshown = ""\ncommands = []\nseconds = 1\n'
    path.write_text(f"[[work]]\n{entry}[[work]]\n{entry}")
    with pytest.raises(ValueError, match="two entries have one name"):
        gpu_queue.queue(path)


def test_commands_name_scripts_options_and_tests_that_exist(gpu_queue) -> None:
    for work in gpu_queue.queue():
        for command in work.commands:
            files = re.findall(r"\b(?:benchmarks|tests)/[\w/]+\.py\b", command)
            assert files or "-m transect " in command
            assert all((ROOT / file).is_file() for file in files)
            source = (ROOT / files[0]).read_text() if files else ""
            for option in re.findall(r" (--[a-z-]+)", command) if files else ():
                assert f'"{option}"' in source, f"{files[0]} has no option {option}"
