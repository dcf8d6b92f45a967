"""``transect train`` as a user runs it: from a file, stopped by a signal, killed, and taken up again."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commands import run_here
from effort import proving
from training_runs import tiny_run
from warm_processes import cold

from transect.train.loop import checkpoint, follow
from transect.train.loop.report import read_log

TOML = """
model = "{folder}/model"
run_dir = "{folder}/runs/{name}"
steps = {steps}
save_every = 3
eval_every = 5
threads = 1
device = "cpu"

[data]
train = ["{folder}/text.txt"]
validation = ["{folder}/few.txt"]
seq_len = 64
micro_batch = 256

[optimizer]
learning_rate = 1e-3
"""


HELD = """
import sys, time
from pathlib import Path
from transect.cli import main
from transect.train.loop.trainer import Trainer

step, last, release = Trainer.step, int(sys.argv.pop(1)), Path(sys.argv.pop(1))

def held(self):
    while self.steps_done == last and not release.exists():
        time.sleep(0.01)
    return step(self)

Trainer.step = held
main()
"""
"""``transect train`` that stops after a step until a file is there, so that a signal comes before the end."""


def start(folder, *arguments, held_at=None):
    """Start ``transect train``; ``held_at``: it waits after this step for the file ``released``."""
    command = [sys.executable, "-m", "transect"]
    if held_at is not None:
        command = [sys.executable, "-c", HELD, str(held_at), str(folder / "released")]
    command += ["train", *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(folder, *arguments):
    """In this process; with ``--prove`` in one of its own."""
    if not proving():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            done = run_here("train", *map(str, arguments))
        return done.returncode, done.stdout + done.stderr
    process = start(folder, *arguments)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def write_config(folder, name, steps=20):
    path = folder / f"{name}.toml"
    path.write_text(TOML.format(folder=folder, name=name, steps=steps))
    return path


def losses(folder, name):
    return [line["loss"] for line in read_log(folder / "runs" / name) if line["kind"] == "step"]


def wait_for_step(folder, name, step):
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline:
        if len(losses(folder, name)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not get that far")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    tiny_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = run_here("train", str(write_config(folder, "whole")))
    assert done.returncode == 0, done.stderr
    out = done.stdout + done.stderr
    assert "done: transect serve" in out and "validation loss" in out and "bits per byte" in out
    assert len(losses(folder, "whole")) == 20
    return folder


def test_killed_and_resumed_it_is_the_same_run(folder) -> None:
    arguments = (write_config(folder, "killed"),)
    for step in (4, 9, 14) if proving() else (4,):
        process = start(folder, *arguments, held_at=step)
        wait_for_step(folder, "killed", step)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if checkpoint.list_steps(folder / "runs" / "killed"):  # else killed before the first one was whole
            arguments = ("--resume", "--run", "runs/killed")
    code, out = finish(folder, *arguments)
    assert code == 0, out
    assert losses(folder, "killed") == losses(folder, "whole")
    a, b = (checkpoint.newest(folder / "runs" / name) for name in ("killed", "whole"))
    assert all((a.tensors[name] == b.tensors[name]).all() for name in b.tensors)


def test_sigterm_writes_a_checkpoint_and_resume_needs_no_argument(folder) -> None:
    with cold():
        process = start(folder, write_config(folder, "stopped"), held_at=4)
    wait_for_step(folder, "stopped", 4)
    process.send_signal(signal.SIGTERM)
    (folder / "released").touch()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 143, out
    assert "stopped at step" in out
    stopped = checkpoint.newest(folder / "runs" / "stopped").step
    assert stopped >= 4
    os.utime(folder / "runs" / "stopped" / f"step-{stopped:08}", (2**31, 2**31))
    code, out = finish(folder, "--resume")
    assert code == 0, out
    assert losses(folder, "stopped") == losses(folder, "whole")


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGHUP,), (signal.SIGTERM,)])
def test_a_second_ctrl_c_and_a_closed_terminal_save_too(tmp_path, capsys, numbers) -> None:
    """In this process, so that the signals come exactly where they should: while a step is on its way."""
    from transect.cli.train import _run
    from transect.train.loop.trainer import Trainer

    trainer = Trainer(tiny_run(tmp_path))
    step = trainer.step

    def signalled():
        record = step()
        if trainer.steps_done == 2:
            for number in numbers:
                signal.raise_signal(number)
        return record

    trainer.step = signalled
    assert _run(trainer) == 128 + numbers[0]
    assert checkpoint.newest(tmp_path / "run").step == 2
    assert ("a third signal ends the run" in capsys.readouterr().err) == (len(numbers) == 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the TOML file of a run"),
        (("nothing.toml",), "cannot read nothing.toml"),
        (("whole.toml",), "holds a run already"),
        (("--resume", "--run", "runs/none"), "no checkpoint to resume from"),
    ],
)
def test_mistakes_get_one_line(folder, arguments, message: str, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    done = run_here("train", *arguments)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("transect: error: ") and len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_a_second_process_is_refused_and_disturbs_nothing(folder) -> None:
    with checkpoint.RunLock(folder / "runs" / "whole"):
        process = start(folder, "--resume", "--run", "runs/whole")
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and "another process trains in runs/whole" in out.replace(str(folder) + "/", "")
    assert len(losses(folder, "whole")) == 20


def test_a_run_goes_on_from_the_step_that_is_named(folder) -> None:
    whole = checkpoint.list_steps(folder / "runs" / "whole")
    copied = folder / "runs" / "again"
    shutil.copytree(folder / "runs" / "whole", copied, symlinks=True)
    code, out = finish(folder, "--resume", "--run", f"runs/again/{whole[0].name}")
    assert code == 0, out
    assert f"{whole[-1].name} is of a step after this one and was set aside" in out
    assert losses(folder, "again") == losses(folder, "whole")


def test_the_log_is_json_lines_with_every_step_once(folder) -> None:
    lines = [json.loads(line) for line in (folder / "runs" / "whole" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 21))
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [5, 10, 15, 20]
    assert all(line["tokens_per_second"] > 0 and line["mfu"] > 0 for line in lines if line["kind"] == "step")


def test_a_command_that_torchrun_starts_again_goes_on(folder, monkeypatch) -> None:
    file = write_config(folder, "restarted", steps=4)
    assert run_here("train", str(file), "--steps", "3").returncode == 0
    again = ("train", str(file), "--steps", "4")
    assert run_here(*again).returncode == 2  # by hand it must be said
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    done = run_here(*again)
    assert done.returncode == 0 and "resumes from step-00000003" in done.stderr
    assert len(losses(folder, "restarted")) == 4


def test_a_signal_to_any_rank_of_torchrun_asks_all_to_stop(folder, monkeypatch) -> None:
    """torchrun passes signals on to every rank; one that died of it would take the last steps with it."""
    said = []

    def followed(world, run, should_stop):
        said.append(should_stop())
        os.kill(os.getpid(), signal.SIGTERM)
        said.append(should_stop())

    monkeypatch.setattr(follow, "follow", followed)
    monkeypatch.setattr(follow, "crew", lambda run: contextlib.nullcontext(object()))
    monkeypatch.setenv("RANK", "1")
    before = signal.getsignal(signal.SIGTERM)
    assert run_here("train", str(write_config(folder, "asked", steps=2))).returncode == 0
    assert said == [False, True] and signal.getsignal(signal.SIGTERM) is before
