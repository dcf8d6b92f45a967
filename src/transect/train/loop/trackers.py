"""Log runs to Weights & Biases and MLflow, if ``log_to`` asks for them.

Both are listeners of a run, as its log file is. ``RUN/tracking.json`` keeps their names of the run, so that a resumed
run continues its record there. If either is set to work offline (``WANDB_MODE=offline``, a
folder as ``MLFLOW_TRACKING_URI``) nothing leaves the machine.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from ..config import TrainConfig
from .samples import SampleRecord
from .trainer import EvalRecord, Listener, StepRecord

NAMES = "tracking.json"


class Service(Protocol):
    """A service that keeps numbers of runs by step; ``id`` is its name of this run."""

    id: str

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def text(self, name: str, text: str, step: int) -> None: ...

    def close(self) -> None: ...


class Tracker(Listener):
    """Sends the events of a run to a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def step(self, record: StepRecord) -> None:
        values = {**asdict(record), "tokens_per_second": record.tokens_per_second, **record.extra}
        self._send("train", values, record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self._send("validation", {**asdict(record), **record.extra}, record.step)

    def sample(self, record: SampleRecord) -> None:
        self._service.text("sample", f"{record.prompt}\n---\n{record.answer}", record.step)

    def close(self) -> None:
        """Close the record."""
        self._service.close()

    def _send(self, kind: str, values: Mapping[str, Any], step: int) -> None:
        numbers = {f"{kind}/{name}": float(v) for name, v in values.items() if isinstance(v, (int, float))}
        numbers.pop(f"{kind}/step", None)
        self._service.log(numbers, step)


class Wandb:
    """Weights & Biases. See ``Service``."""

    def __init__(self, config: TrainConfig, known: str | None) -> None:
        wandb = _library("wandb")
        self._wandb = wandb
        self._run = wandb.init(
            project=config.project, name=Path(config.run_dir).name, dir=config.run_dir, id=known, resume="allow",
            config=config.to_dict(),
        )  # fmt: skip
        self.id = str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{_escaped(text)}</pre>")}, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow. See ``Service``."""

    def __init__(self, config: TrainConfig, known: str | None) -> None:
        self._mlflow = _library("mlflow")
        self._mlflow.set_experiment(config.project)
        name = Path(config.run_dir).name
        run = self._mlflow.start_run(run_id=known) if known else self._mlflow.start_run(run_name=name)
        self.id = str(run.info.run_id)
        if known is None:
            self._mlflow.log_params({key: str(value)[:500] for key, value in flat(config.to_dict()).items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._mlflow.log_text(text, f"{name}s/{step:08}.txt")

    def close(self) -> None:
        self._mlflow.end_run()


SERVICES: dict[str, Callable[[TrainConfig, str | None], Service]] = {"wandb": Wandb, "mlflow": Mlflow}


def trackers(config: TrainConfig) -> list[Tracker]:
    """Build a tracker for each service in ``config.log_to``.

    Raises:
        ValueError: the service's library is not installed.
    """
    path = Path(config.run_dir) / NAMES
    known = json.loads(path.read_text()) if path.exists() else {}
    made = []
    for name in config.log_to:
        if name in SERVICES:
            service = SERVICES[name](config, known.get(name))
            known[name] = service.id
            made.append(Tracker(service))
    if made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known) + "\n")
    return made


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one, with dots in the keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"log_to = \"{name}\" needs {name}: pip install 'transect[track]'") from None


def _escaped(text: str) -> str:
    import html

    return html.escape(text)
