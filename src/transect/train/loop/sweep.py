"""Train runs over a grid of settings, one after another.

```toml
base = "run.toml"            # what all runs share

[grid]
"optimizer.learning_rate" = [1e-4, 3e-4]
"lora.rank" = [8, 32]
```

Each run has a directory of its own below ``run_dir`` of the base (or ``sweep_dir``), named by its settings. So an
interrupted sweep resumes: finished runs are not trained again, and a run with a checkpoint resumes there. A directory
with a run of other settings is left alone and reported.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from .checkpoint import RunLock, list_steps, newest
from .follow import RunArguments, crew
from .health import TrainingStopped
from .report import RunLog, read_log
from .trackers import trackers
from .trainer import Listener

ALIKE = {"run_dir", "data.date", "threads", "device", "memory", "keep", "save_every", "log_to", "project"}
"""Settings that do not affect the results of a run."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep. ``settings``: its values of the grid, by key."""

    name: str
    settings: Mapping[str, Any]
    config: TrainConfig


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run: its last loss, its best validation loss, or the reason that it stopped."""

    point: SweepPoint
    loss: float | None = None
    validation: float | None = None
    steps: int = 0
    seconds: float = 0.0
    problem: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key; lower is better, by validation loss if there is one."""
        value = self.validation if self.validation is not None else self.loss
        return bool(self.problem) or value is None, value or 0.0


def read_grid(path: str | Path) -> list[SweepPoint]:
    """Read the runs of a sweep's file, in the order of the grid.

    Raises:
        ValueError: the file or the base cannot be read, a key is not a setting, or a value does not fit it.
    """
    path = Path(path)
    try:
        grid = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    if unknown := sorted(set(grid) - {"base", "grid", "sweep_dir"}):
        raise ValueError(f"{path}: {unknown[0]} is not known; a sweep has base, sweep_dir and [grid]")
    axes = _axes(grid.get("grid", {}))
    if not isinstance(grid.get("base"), str) or not axes:
        raise ValueError(f'{path} needs base = "RUN.toml" and a table [grid] of lists of values')
    base = path.parent / grid["base"]
    shared = TrainConfig.from_toml(base)
    points = points_of(base, axes, Path(grid.get("sweep_dir", shared.run_dir)))
    if len({point.name for point in points}) < len(points):
        raise ValueError(f"{path}: two points of the grid are the same")
    return points


def points_of(
    base: Path, axes: Mapping[str, Sequence[Any]], folder: Path, settings: Sequence[str] = ()
) -> list[SweepPoint]:
    """Return a run for each point of a grid; without axes a single one, called ``run``.

    Args:
        axes: values by dotted key.
        folder: parent of the runs' directories.
        settings: ``key=value`` for all runs, which replace the base's.

    Raises:
        ValueError: the base cannot be read, a key is not a setting, or a value does not fit it.
    """
    points = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        name = _name(chosen) or "run"
        given = [*settings, *(f"{key}={json.dumps(value)}" for key, value in chosen.items())]
        config = TrainConfig.from_toml(base, [*given, f"run_dir={json.dumps(str(folder / name))}"])
        points.append(SweepPoint(name, chosen, config))
    return points


def _axes(values: Mapping[str, Any], before: str = "") -> dict[str, list[Any]]:
    """Flatten lists of values to dotted keys; tables may be used for the dots."""
    found: dict[str, list[Any]] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _axes(value, f"{before}{key}.")
        elif isinstance(value, list) and value:
            found[before + key] = value
        else:
            raise ValueError(f"the grid's {before}{key} must be a list of values, not {value!r}")
    return found


def _name(settings: Mapping[str, Any]) -> str:
    parts = (f"{key.rsplit('.', 1)[-1]}={value}" for key, value in settings.items())
    return re.sub(r"[^\w.=+-]+", "_", ",".join(parts))


def sweep(
    points: Sequence[SweepPoint],
    tell: Callable[[str], None] = print,
    should_stop: Callable[[], bool] = lambda: False,
    listeners: Sequence[Listener] = (),
) -> Iterator[Outcome]:
    """Train the runs that are not finished; one ``Outcome`` for each that is. ``listeners`` receive the events of all
    of them.

    A run that stops because of what it saw counts as an outcome with that problem, and the next one follows.
    """
    for number, point in enumerate(points, 1):
        if should_stop():
            return
        tell(f"run {number} of {len(points)}: {point.name}")
        try:
            with RunLock(point.config.run_dir):
                finished = _train(point, should_stop, listeners)
        except (TrainingStopped, ValueError) as error:
            yield Outcome(point, problem=str(error))
            continue
        if finished:
            yield outcome(point)


def _train(point: SweepPoint, should_stop: Callable[[], bool], listeners: Sequence[Listener]) -> bool:
    """Train or resume a run; return True if it has finished."""
    found = newest(point.config.run_dir) if list_steps(point.config.run_dir) else None
    asked = config = point.config
    if found is not None:
        check_same(found.state["config"], asked)
        free = {name: getattr(asked, name) for name in ALIKE if "." not in name}
        config = replace(TrainConfig.from_dict(found.state["config"]), **free)
    this = RunArguments(config.to_dict(), None if found is None else found.path)
    with crew(this) as world:
        trainer = this.trainer(world)
        steps = trainer.config.steps
        if asked.epochs and steps != trainer.objective.steps_of(asked.epochs, asked.accumulate):
            raise ValueError(_other(asked, "steps", steps, f"epochs = {asked.epochs:g}"))
        log = RunLog(config.run_dir, trainer.steps_done)
        followers = trackers(config)
        try:
            trainer.run([log, *followers, *listeners], should_stop)
        finally:
            log.close()
            for follower in followers:
                follower.close()
        return trainer.finished


def check_same(kept: Mapping[str, Any], asked: TrainConfig) -> None:
    """Check that the run in a point's directory has the point's settings.

    Args:
        kept: the configuration of its checkpoint.

    Raises:
        ValueError: it was trained with other settings; the message names the first.
    """
    old, new = (
        dict(_flat(values)) for values in (json.loads(json.dumps(kept)), json.loads(json.dumps(asked.to_dict())))
    )
    counted = {"epochs", "steps"} if asked.epochs else {"epochs"}  # a run that has begun knows its steps
    for name in sorted(old.keys() & new.keys() - counted - ALIKE):
        if old[name] != new[name]:
            raise ValueError(_other(asked, name, old[name], repr(new[name])))


def _other(asked: TrainConfig, name: str, kept: Any, wanted: str) -> str:
    return (
        f"{asked.run_dir} holds a run with {name} = {kept!r}, and this sweep asks for {wanted}: move it away, or set "
        "another sweep_dir"
    )


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value


def outcome(point: SweepPoint) -> Outcome:
    """Read the outcome of a finished run from its log."""
    lines = read_log(point.config.run_dir)
    steps = [line for line in lines if line["kind"] == "step"]
    checks = [line["loss"] for line in lines if line["kind"] == "evaluation"]
    return Outcome(
        point, steps[-1]["loss"], min(checks, default=None), steps[-1]["step"], sum(line["seconds"] for line in steps)
    )
