"""``transect train``: pretrain or fine-tune a model as a TOML file says, or continue a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..train.loop.report import MatrixRate
    from ..train.loop.trainer import Trainer


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; see docs/train/training.md.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the newest run under runs/, or --run.")] = False,
    run: Annotated[Path | None, typer.Option(help="The run to resume: its directory, or a step-... inside.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps, in place of the file's.")] = None,
    settings_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE in place of the file's, such as optimizer.clip=0.5.")
    ] = None,
    allow_changed: Annotated[
        str, typer.Option(help="Resume although these have changed: data, masks, base, sizes; comma-separated.")
    ] = "",
) -> int:
    """Train a model. Ctrl-C, SIGTERM and SIGHUP write a checkpoint; --resume continues the run exactly."""
    from ..train.config import TrainConfig
    from ..train.loop import checkpoint
    from ..train.loop.follow import RunArguments, crew, follow, started_again

    changes = [*(settings_ or []), *([] if steps is None else [f"steps={steps}"])]
    found = None
    if resume or run is not None:
        if config is not None:
            raise ValueError("a resumed run brings its own configuration: leave the file out")
        found = checkpoint.newest(run or newest_run(Path("runs")))
        settings = TrainConfig.from_dict({**found.state["config"], "run_dir": str(found.path.parent)}, changes)
    elif config is None:
        raise ValueError("give the TOML file of a run, or --resume")
    else:
        settings = TrainConfig.from_toml(config, changes)
        # torchrun restarts the same command after a rank has ended: the run continues.
        if started_again(settings) and checkpoint.list_steps(settings.run_dir):
            found = checkpoint.newest(settings.run_dir)
            print(f"transect: started again by torchrun, resumes from {found.path.name}", file=sys.stderr)
    if found is None and checkpoint.list_steps(settings.run_dir):
        raise ValueError(
            f"{settings.run_dir} holds a run already: resume it with --resume --run {settings.run_dir}, or set "
            "another run_dir"
        )
    allowed = [part for part in allow_changed.split(",") if part]
    this = RunArguments(settings.to_dict(), None if found is None else found.path, allowed)
    if int(os.environ.get("RANK", 0)):  # torchrun has started this rank as well: the first one speaks for all
        with crew(this) as world:
            assert world is not None
            with _asked_to_stop() as asked:  # torchrun passes signals on to every rank
                follow(world, this, lambda: bool(asked))
        return 0
    with checkpoint.RunLock(settings.run_dir):
        if found is not None:
            for later in checkpoint.set_aside_after(found):
                print(f"transect: {later.name} is of a step after this one and was set aside", file=sys.stderr)
        with crew(this) as world:
            trainer = this.trainer(world)
            for line in (trainer.memory.why, *trainer.told, *trainer.objective.described()):
                print(f"transect: {line}", file=sys.stderr)
            return _run(trainer)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Collect the signals that request an end; the third one ends the process at once."""
    asked: list[int] = []

    def stop(signum: int, _frame: Any) -> None:
        asked.append(signum)
        if len(asked) == 2:
            print("transect: a checkpoint is being written; a third signal ends the run without it", file=sys.stderr)
        if len(asked) > 2:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(trainer: Trainer) -> int:
    """Train until the end or a signal. Returns the exit code: 0, or 128 and the signal's number."""
    from ..train.loop.report import RunLog, Terminal
    from ..train.loop.trackers import trackers
    from .predicted import RunPace, compared

    settings = trainer.config
    board = "tensorboard" in settings.log_to
    run_log = RunLog(settings.run_dir, trainer.steps_done, rate=matrix_rate(trainer), tensorboard=board)
    followers = trackers(settings)
    pace = RunPace()
    with _asked_to_stop() as asked:
        try:
            with Terminal(settings.steps, trainer.steps_done, run_log) as terminal:
                last = trainer.run([run_log, terminal, pace, *followers], lambda: bool(asked))
        finally:
            run_log.close()
            for follower in followers:
                follower.close()
    if said := compared(trainer, pace):
        print(said)
    if not trainer.finished:
        print(f"stopped at step {trainer.steps_done}; continue with transect train --resume --run {settings.run_dir}")
        return 128 + (asked or [signal.SIGTERM])[0]  # or another rank was asked
    if trainer.stopped_early:
        print(f"stopped early at step {trainer.steps_done}: {trainer.best.since} measurements without a better loss")
    if trainer.best.step:
        loss, step = trainer.best.loss, trainer.best.step
        print(f"best: {last.parent / 'best'}, validation loss {loss:.4f} at step {step}")
    print(f"done: transect serve {last.parent / 'last'}")
    return 0


def matrix_rate(trainer: Trainer) -> MatrixRate | None:
    """Return the rate that MFU is relative to: products in the run's dtype on its device; None if unknown."""
    from ..hardware.device import detect
    from ..ops.cpu.ceilings import device_measurement
    from ..train.loop.report import MatrixRate

    measured = device_measurement(detect(trainer.device.type))
    dtype = "float32" if trainer.config.precision == "float32" else "bfloat16"
    if dtype not in measured.ceilings.flops_per_second:
        return None
    devices = (
        trainer.config.parallel.layout.size if trainer.device.type == "cuda" else 1
    )  # ranks on a CPU share its cores
    return MatrixRate(devices * measured.ceilings.rate(dtype), dtype, str(measured))


def newest_run(folder: Path) -> Path:
    """Return the run whose checkpoint was written last. Raises ValueError if there is none."""
    from ..train.loop.checkpoint import list_steps

    runs = [(steps[-1].stat().st_mtime, path) for path in folder.glob("*") if (steps := list_steps(path))]
    if not runs:
        raise ValueError(f"there is no run with a checkpoint under {folder}/: name it with --run")
    return max(runs)[1]
