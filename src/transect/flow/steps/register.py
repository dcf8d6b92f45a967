"""Registration: a model that passed the gate becomes a version with its lineage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import __version__
from ...hardware.environment import commit
from ..catalog.models import model_of
from ..catalog.versions import VersionCatalog
from .step import FlowStep, StepContext, StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRegistry:
    """The registry of a flow's models.

    Attributes:
        path: directory of versions, relative to the flow's file. Flows of one model share it. Adapters are served from
            here: give it to the server as ``--allowed-lora-dir``.
        mlflow: address of an MLflow server or store, to whose registry the versions are added; ``environment`` for
            ``MLFLOW_TRACKING_URI`` if that is set; empty for files alone.
    """

    path: str = "registry"
    mlflow: str = "environment"

    def catalog(self, context: StepContext) -> VersionCatalog:
        """Open the registry.

        Raises:
            ValueError: MLflow is configured and not installed.
        """
        path = context.path(self.path)
        address = os.environ.get("MLFLOW_TRACKING_URI", "") if self.mlflow == "environment" else self.mlflow
        if not address:
            return VersionCatalog(path)
        from ..catalog.mlflow import MlflowCatalog

        return MlflowCatalog(path, address)


def _inputs(context: StepContext) -> Mapping[str, Any]:
    return {
        "registry": str(context.path(context.tables["register"].path).resolve()),
        "mlflow": context.tables["register"].mlflow,
        "model": context.output("train", "digest"),
        "made from": context.output("train", "made_from"),
        "against": context.output("gate", "version"),
    }


def _plan(context: StepContext) -> str:
    return f"register the model as a version of {context.model} in {context.tables['register'].path}"


def _lost(context: StepContext, outcome: StepOutcome) -> str:
    path = context.path(context.tables["register"].path) / outcome.outputs["version"]
    return "" if path.is_dir() else f"{path} is missing"


def _run(context: StepContext) -> StepOutcome:
    catalog = context.tables["register"].catalog(context)
    folder = context.file("train", "model")
    assert folder is not None
    outputs = context.before["train"].outputs
    model = model_of(str(folder), base=outputs["base"])
    gate = context.before["gate"]
    parents = [name for name in (outputs["start"], gate.outputs["version"]) if name]
    lineage = {
        "made_from": outputs["made_from"],
        "data": {
            **context.before["data"].outputs,
            "files": {name: str(context.path(name)) for name in context.tables["data"].files},
        },
        "code": {"transect": __version__, "commit": commit(), "flow_commit": commit(context.root)},
        "settings": outputs["settings"],
        "base_name": outputs["base"],
        "start": outputs["start"],
        "against": gate.outputs["version"],
        "parents": list(dict.fromkeys(parents)),
        "gate": {"reason": gate.reason, "figures": gate.figures},
        "training": context.before["train"].figures,
    }
    version = catalog.add(context.model, model, folder, lineage)
    return StepOutcome(
        reason=f"{version.name}: data {outputs['data']}, base {outputs['base']}"
        + (f", after {', '.join(lineage['parents'])}" if lineage["parents"] else ""),
        figures={"version": version.name, "bytes": model.size},
        outputs={
            "version": version.name,
            "digest": model.digest,
            "path": str(catalog.path.resolve() / version.name),
            "adapter": model.adapter is not None,
            "base": outputs["base"],
        },
    )


REGISTER = FlowStep(
    name="register", place=40, settings=FlowRegistry, inputs=_inputs, plan=_plan, run=_run, lost=_lost
)  # fmt: skip
