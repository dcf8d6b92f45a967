"""The training of a flow: a run of the trainer's own file over the data of the flow, or the best of a grid of runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..catalog.models import adapter_digest, model_of, newest_model
from ..catalog.versions import ModelVersion
from ..digests import key_of
from .step import FlowStep, StepContext, StepOutcome

if TYPE_CHECKING:
    from ...train.loop.samples import SampleRecord
    from ...train.loop.sweep import Outcome, SweepPoint
    from ...train.loop.trainer import EvalRecord, StepRecord

SHOWN_EVERY_S = 1.0
"""Shortest time between two states of a running training in ``chain.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTraining:
    """Training of a flow.

    Attributes:
        run: the run's file, as for ``transect train``, relative to the flow's file. The flow replaces its data and its
            run_dir.
        settings: ``key=value`` settings that replace those of the run.
        grid: lists of values by dotted key: a run for each combination; the one with the lowest validation loss counts.
        continue_current: begin with the adapter of the current model, as preference training does.
    """

    run: str
    settings: tuple[str, ...] = ()
    grid: dict[str, Any] = field(default_factory=dict, hash=False)
    continue_current: bool = False

    def __post_init__(self) -> None:
        for key, values in self.grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"train.grid.{key} must be a list of values, not {values!r}")


def _points(context: StepContext, start: ModelVersion | None) -> list[SweepPoint]:
    """Return the runs; their data are missing in a plan whose data are not made yet.

    Raises:
        ValueError: a setting is at fault, or a whole model is to be released.
    """
    from ...train.loop.sweep import points_of  # imports torch, which takes seconds

    settings: FlowTraining = context.tables["train"]
    given = [*settings.settings, "data.columns={}"]
    for name in ("train", "validation"):
        path = context.file("data", name)
        given.append(f"data.{name}={json.dumps([] if path is None else [str(path)])}")
    if start is not None:
        given.append(f"lora.start={json.dumps(str(start.model.adapter))}")
    points = points_of(context.path(settings.run), settings.grid, context.folder / "runs", given)
    whole = next((point.config.task for point in points if not point.config.task.endswith("lora")), None)
    if whole is not None and "release" in context.tables:
        raise ValueError(
            f"task = {whole!r} trains a whole model, and versions of a release are adapters of one server: set task to "
            f"lora in {settings.run}, or leave out [release] and [watch]; the gate decides then, and `transect serve` "
            "takes the registered version by its path"
        )
    return points


def _start(context: StepContext) -> ModelVersion | None:
    """Return the version to continue; None if there is none yet.

    If a version is registered that this very training has made, the training still begins where it began then: a flow
    that is done stays done.
    """
    if not context.tables["train"].continue_current:
        return None
    catalog = context.tables["register"].catalog(context)
    found = catalog.current(context.model)
    for known in catalog.lineages(context.model):
        before = catalog.version(known["start"]) if known["start"] else None
        if key_of(_inputs_from(context, before)) == known["made_from"]:
            found = before
            break
    if found is None:
        return None
    if found.model.adapter is None:
        raise ValueError(
            f"train.continue_current needs an adapter, and {found.name} is a whole model: set model in "
            f"{context.tables['train'].run} to {found.model.path}, and leave train.continue_current out"
        )
    return found


def _inputs(context: StepContext) -> Mapping[str, Any]:
    return _inputs_from(context, _start(context))


def _inputs_from(context: StepContext, start: ModelVersion | None) -> dict[str, Any]:
    points = _points(context, start)
    return {
        "runs": [_plain(point) for point in points],
        "data": dict(context.output("data", "digests")),
        "base": model_of(points[0].config.model).digest,
        "start": "" if start is None or start.model.adapter is None else adapter_digest(start.model.adapter),
    }


def _plain(point: SweepPoint) -> dict[str, Any]:
    """Return the settings of a run that affect its result; files and adapters count by their contents."""
    from ...train.loop.sweep import ALIKE

    values = json.loads(json.dumps(point.config.to_dict()))
    for name in ALIKE - {"data.date"}:
        values.pop(name, None)
    for table, name in (("data", "train"), ("data", "validation"), ("lora", "start")):
        values[table].pop(name)
    return dict(values)


def _plan(context: StepContext) -> str:
    points = _points(context, _start(context))
    config = points[0].config
    length = f"{config.epochs:g} epochs" if config.epochs else f"{config.steps} steps"
    runs = f"a grid of {len(points)} runs of" if len(points) > 1 else ""
    start = " from the current adapter" if context.tables["train"].continue_current else ""
    return " ".join(f"train {runs} {config.task} of {config.model} ({config.objective}, {length}){start}".split())


class _Progress:
    """Shows the step and the loss of the run that trains now. See ``Listener``."""

    def __init__(self, context: StepContext, runs: int) -> None:
        self._context, self._all, self.runs, self._shown = context, runs, 0, 0.0

    def step(self, record: StepRecord) -> None:
        if time.monotonic() - self._shown > SHOWN_EVERY_S:
            self._shown = time.monotonic()
            self._context.show({"run": f"{self.runs + 1} of {self._all}", "step": record.step, "loss": record.loss})

    def evaluation(self, record: EvalRecord) -> None:
        pass

    def sample(self, record: SampleRecord) -> None:
        pass


def _run(context: StepContext) -> StepOutcome:
    from ...train.loop.sweep import sweep

    start = _start(context)
    points = _points(context, start)
    outcomes: list[Outcome] = []
    progress = _Progress(context, len(points))
    for found in sweep(points, context.tell, context.should_stop, [progress]):
        outcomes.append(found)
        progress.runs += 1
    context.check_stop()
    best = min(outcomes, key=lambda each: each.rank)
    if best.problem:
        raise ValueError(f"the run {best.point.name} failed: {best.problem}")
    checkpoint = newest_model(Path(best.point.config.run_dir))
    model = model_of(str(checkpoint), base=best.point.config.model)
    loss = best.validation if best.validation is not None else best.loss
    kind = "validation loss" if best.validation is not None else "loss"
    chosen = f"{best.point.name} of {len(points)} runs, " if len(points) > 1 else ""
    return StepOutcome(
        reason=f"{chosen}{kind} {loss:.4f} after {best.steps} steps",
        figures={
            "loss": best.loss,
            "validation loss": best.validation,
            "steps": best.steps,
            "training seconds": round(best.seconds, 1),
            "runs": len(points),
            "bytes": model.size,
        },
        outputs={
            "digest": model.digest,
            "base": best.point.config.model,
            "run": best.point.name,
            "settings": _plain(best.point),
            "data": context.output("data", "version"),
            "start": "" if start is None else start.name,
            "made_from": key_of(_inputs_from(context, start)),
        },
        files={"model": str(checkpoint.relative_to(context.folder.resolve()))},
    )


TRAIN = FlowStep(name="train", place=20, settings=FlowTraining, inputs=_inputs, plan=_plan, run=_run, missing="refuse")
