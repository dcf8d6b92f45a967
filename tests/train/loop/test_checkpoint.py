"""Checkpoints that are whole or not there: kills at random moments, full disks, damage, and foreign directories."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from effort import proving

from transect.train.loop import checkpoint
from transect.train.loop.checkpoint import Snapshot, Writer, list_steps, newest, read

WRITES_FOR_EVER = """
import sys, torch
from pathlib import Path
from transect.train.loop.checkpoint import Snapshot, Writer
run, size = Path(sys.argv[1]), int(sys.argv[2])
with Writer(run, keep=2) as writer:
    print("ready", flush=True)
    for step in range(int(sys.argv[3]), 10**6):
        tensors = {"a": torch.full((size,), float(step)), "b": torch.arange(step % 97 + 1)}
        write = lambda folder, s=step: (folder / "model.txt").write_text(str(s))
        writer.save(Snapshot(step, write, tensors, {"n": step}))
"""


def snapshot(step, size=10):
    return Snapshot(
        step, lambda folder: (folder / "model.txt").write_text("m"), {"t": torch.full((size,), 1.5)}, {"loss": 0.1}
    )


def save(run, *steps, keep=3):
    with Writer(run, keep) as writer:
        for step in steps:
            writer.save(snapshot(step))


def test_the_newest_few_are_kept_and_last_points_to_the_newest(tmp_path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert [path.name for path in list_steps(tmp_path)] == ["step-00000004", "step-00000005"]
    assert (tmp_path / "last").resolve().name == "step-00000005"
    found = newest(tmp_path)
    assert found.step == 5 and found.state == {"loss": 0.1}
    assert torch.equal(found.tensors["t"], torch.full((10,), 1.5))
    assert not list(tmp_path.glob(".partial*"))


def test_killed_at_random_moments_whatever_is_there_is_whole(tmp_path) -> None:
    script = tmp_path / "writes.py"
    script.write_text(WRITES_FOR_EVER)
    run = tmp_path / "run"
    rng = random.Random(0)
    step, partials, kills = 1, 0, 0
    # At least so many kills, and as many more as it takes until one falls into a write and one comes after a write.
    while kills < (6 if proving() else 2) or ((step == 1 or not partials) and kills < 40):
        kills += 1
        command = [sys.executable, str(script), str(run), "500000", str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.2 + 0.05 * kills))  # longer and longer: a disk may be slow
            process.send_signal(signal.SIGKILL)
        partials += len(list(run.glob(".partial-*")))
        for path in list_steps(run):
            found = read(path)
            assert found.state["n"] == found.step
            assert (path / "model.txt").read_text() == str(found.step)
            assert bool((found.tensors["a"] == found.step).all())
        if steps := list_steps(run):
            first_without_links = len(steps) == 1 and not (run / "last").is_symlink()
            assert first_without_links or (run / "last").resolve() in steps
            step = newest(run).step + 1
    assert step > 1
    (run / ".partial-link-1").symlink_to("step-00000001")  # a kill just before the link would have got its name
    assert partials  # some kills did fall into a write
    save(run, step)  # and the next run clears up what they left
    assert not list(run.glob(".partial-*"))


def altered(path, was, now):
    text = path.read_text()
    assert text.count(was) == 1
    path.write_text(text.replace(was, now))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "train_state.safetensors").write_bytes(b"x"), "has 1 bytes and should have"),
        (lambda p: (p / "model.txt").unlink(), "model.txt is missing"),
        (lambda p: (p / "model.txt").write_text("n"), "SHA-256 differs"),
        (lambda p: (p / "train_state.json").write_text("{"), "is damaged"),
        (lambda p: altered(p / "train_state.json", '"step": 2', '"step": 3'), "train_state.json is damaged"),
        (lambda p: altered(p / "train_state.json", '"loss": 0.1', '"loss": 0.3'), "train_state.json is damaged"),
        (lambda p: (p / "train_state.json").unlink(), "is not a training checkpoint"),
        (lambda p: (p / "train_state.json").write_text(json.dumps({"version": 9, "step": 1, "state": {}, "files": {}})),
         "version 9"),
    ],
)  # fmt: skip
def test_damage_is_named_and_the_others_are_untouched(tmp_path, damage, message: str) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    with pytest.raises(ValueError, match=message):
        newest(tmp_path)
    assert read(tmp_path / "step-00000001").step == 1


def test_the_state_of_an_earlier_version_has_no_sum_of_itself(tmp_path) -> None:
    save(tmp_path, 1)
    file = tmp_path / "step-00000001" / "train_state.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "sha256"}))
    assert newest(tmp_path).step == 1


def test_damage_says_what_to_go_on_from(tmp_path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "model.txt").write_text("other")
    with pytest.raises(ValueError, match="move step-00000002 away to resume from step-00000001"):
        newest(tmp_path)


def test_nothing_to_go_on_from(tmp_path) -> None:
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        newest(tmp_path)
    save(tmp_path, 4, 6)
    with pytest.raises(ValueError, match="step-00000002: resume from step-00000004 or step-00000006"):
        newest(tmp_path / "step-00000002")


def test_a_full_disk_is_reported_and_earlier_checkpoints_stay(tmp_path, monkeypatch) -> None:
    save(tmp_path, 1)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    writer = Writer(tmp_path, keep=2)
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    writer.save(snapshot(2))
    with pytest.raises(ValueError, match=r"No space left on device.*earlier checkpoints are whole"):
        writer.wait()
    monkeypatch.undo()
    assert newest(tmp_path).step == 1
    assert not list(tmp_path.glob(".partial-*"))
    writer.save(snapshot(3))  # space was made
    writer.wait()
    assert newest(tmp_path).step == 3


def test_a_real_full_file_system(tmp_path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse a file that grows past it, as a quota does."""
    program = """
import resource, signal, sys
import torch
from pathlib import Path
from transect.train.loop.checkpoint import Snapshot, Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = Path(sys.argv[1])
make = lambda step, size: Snapshot(step, lambda folder: None, {"t": torch.ones(size)}, {})
with Writer(run, 2) as writer:
    writer.save(make(1, 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    with Writer(run, 2) as writer:
        writer.save(make(2, 2**20))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert "could not be written" in done.stdout, done.stderr
    assert newest(tmp_path).step == 1
    assert [path.name for path in list_steps(tmp_path)] == ["step-00000001"]
