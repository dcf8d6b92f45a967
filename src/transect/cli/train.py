"""``transect train``: pretrain or fine-tune a model as a TOML file says, or go on with a run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..train.trainer import Trainer


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; see docs/training.md.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest run under runs/, or --run.")] = False,
    run: Annotated[Path | None, typer.Option(help="The run to resume: its directory.")] = None,
    steps: Annotated[int | None, typer.Option(help="In place of the file's number of steps.")] = None,
) -> None:
    """Train a model. Ctrl-C or SIGTERM writes a checkpoint and ends; --resume goes on as if nothing had happened."""
    import dataclasses

    from ..train import checkpoint
    from ..train.config import TrainConfig
    from ..train.report import RunLog, Terminal
    from ..train.trainer import Trainer

    found = None
    if resume or run is not None:
        if config is not None:
            raise ValueError("a resumed run brings its own configuration: leave the file out")
        found = checkpoint.newest(run or newest_run(Path("runs")))
        settings = TrainConfig.from_dict(found.state["config"])
        settings = dataclasses.replace(settings, run_dir=str(found.path.parent))
    elif config is None:
        raise ValueError("give a TOML file to train by, or --resume")
    else:
        settings = TrainConfig.from_toml(config)
    if steps is not None:
        settings = dataclasses.replace(settings, steps=steps)
    if found is None and checkpoint.list_steps(settings.run_dir):
        raise ValueError(
            f"{settings.run_dir} holds a run already: go on with it by --resume --run {settings.run_dir}, or set "
            "another run_dir"
        )
    trainer = Trainer(settings, found)
    for line in (trainer.memory.why, *trainer.objective.described()):
        print(f"transect: {line}", file=sys.stderr)
    asked: list[int] = []

    def stop(signum: int, _frame: Any) -> None:
        asked.append(signum)
        signal.signal(signum, signal.SIG_DFL)  # a second one ends at once

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    work, rate = _speeds(trainer)
    run_log = RunLog(settings.run_dir, trainer.steps_done, flops_per_token=work, flops_per_second=rate)
    try:
        with Terminal(settings.steps, trainer.steps_done, run_log) as terminal:
            last = trainer.run([run_log, terminal], lambda: bool(asked))
    finally:
        run_log.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if trainer.steps_done < settings.steps:
        print(f"stopped at step {trainer.steps_done}; transect train --resume --run {settings.run_dir} goes on")
    else:
        print(f"done: transect serve {last.parent / 'last'}")


def _speeds(trainer: Trainer) -> tuple[float, float | None]:
    """FLOPs of a token, and the device's matrix rate in the run's dtype if it is known: what MFU is computed from."""
    from ..hardware.device import detect
    from ..hardware.measured import ceilings
    from ..train.flops import flops_per_token

    config = trainer.config
    rates = ceilings(detect(trainer.device.type)).flops_per_second
    dtype = "float32" if config.precision == "float32" else "bfloat16"
    frozen = config.task in ("lora", "qlora")
    per_token = flops_per_token(trainer.trainable.source.config, config.data.seq_len, frozen=frozen)
    return per_token, rates.get(dtype)


def newest_run(folder: Path) -> Path:
    """The run whose checkpoint was written last. ValueError if there is none."""
    from ..train.checkpoint import list_steps

    runs = [(steps[-1].stat().st_mtime, path) for path in folder.glob("*") if (steps := list_steps(path))]
    if not runs:
        raise ValueError(f"there is no run with a checkpoint under {folder}/: name it with --run")
    return max(runs)[1]
