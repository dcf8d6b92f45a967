"""Describe a run's directory as plain data, for pages: its log, settings, layout, checkpoints, account of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...costs.memory.training_ranks import for_rank, training_ranks
from ...spec.layouts.picture import layout_picture
from ..config import TrainConfig
from ..model.build import device_of
from .checkpoint import STATE, list_steps
from .memory import plan_of, spread_of
from .report import LOG, read_log

MOST_STEPS = 4000
"""Steps of the log that are kept: of more, every second, third, ..."""
KIND = "training run"


def runs_in(folder: Path) -> list[Path]:
    """List the runs in a folder, which may be one itself; the newest first.

    Raises:
        ValueError: there is none.
    """
    if (folder / LOG).exists():
        return [folder]
    found = [path.parent for path in folder.glob(f"*/{LOG}")]
    if not found:
        raise ValueError(f"{folder} holds no run: name a directory that transect train wrote, or a folder of such")
    return sorted(found, key=lambda path: -(path / LOG).stat().st_mtime)


def overview(run_dir: Path) -> dict[str, Any]:
    """Describe a run.

    ``memory`` has the account of each stage's ranks (``Estimate.to_dict``), ``config`` the settings, ``layout`` the
    distribution (``layout_picture``); they are None before the first checkpoint, or if the model is not there any more.

    Raises:
        ValueError: the log is damaged.
    """
    lines = read_log(run_dir)
    steps = [line for line in lines if line.get("kind") == "step"]
    every = -(-len(steps) // MOST_STEPS) or 1
    others = [line for line in lines if line.get("kind") != "step"]
    checkpoints = list_steps(run_dir)
    state = _state(checkpoints[-1]) if checkpoints else {}
    found: dict[str, Any] = {
        "kind": KIND,
        "name": run_dir.name,
        "steps": [*steps[:-1:every], *steps[-1:]],
        "every": every,
        "others": others,
        "checkpoints": [int(path.name.removeprefix("step-")) for path in checkpoints],
        "config": state.get("config"),
        "layout": None,
        "memory": None,
    }
    if found["config"] is not None:
        found |= _account(found["config"], checkpoints[-1])
    return found


def _state(checkpoint: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["state"]
        return found
    except (OSError, ValueError, KeyError):  # it is removed in this moment
        return {}


def _account(settings: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the layout and the account of memory of a run on the device of this machine."""
    from ...checkpoints.resolve import resolve

    try:
        config = TrainConfig.from_dict(settings)
        device = device_of(config.device)
        model = resolve(config.model if config.task in ("lora", "qlora") else str(checkpoint)).config
        spread = spread_of(config, device)
        stages = training_ranks(model, for_rank(plan_of(config, model, device), spread), spread)
    except (OSError, ValueError):  # another version's settings, or files that are gone
        return {}
    layout = layout_picture(spread, model.n_layers, config.accumulate // spread.data)
    return {"layout": layout, "memory": [stage.estimate.to_dict() for stage in stages]}
