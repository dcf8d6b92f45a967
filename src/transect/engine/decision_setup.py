"""The decision log of an engine that is being built: facts about model, formats and device for its header."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from typing import Any

import torch

from ..costs.storage import Storage
from ..hardware.device import detect
from ..hardware.measured import kept
from ..spec.model import ModelConfig
from .config import EngineConfig
from .scheduling.decisions import FORMAT, DecisionLog, Header
from .scheduling.scheduler import Scheduler


def decision_log(
    config: EngineConfig,
    scheduler: Scheduler,
    lag: int,
    model: ModelConfig,
    storage: Storage,
    device: torch.device,
    padding: dict[str, int] | None = None,
) -> DecisionLog | None:
    """Open the log that ``config`` asks for; None if it asks for none. ``padding``: padded step sizes (``GPURunner``).

    Raises:
        ValueError: its file cannot be written.
    """
    if not config.decisions:
        return None
    header = Header(
        FORMAT,
        asdict(scheduler.config),
        lag,
        scheduler.clock.now(),
        {"name": config.model, **_plain(model)},
        _plain(storage),
        _described(device, config, storage) | ({"padding": padding} if padding else {}),
    )
    return DecisionLog(scheduler, header, file=config.decision_log)


def _plain(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that costs depend on."""
    found = {}
    for field in dataclasses.fields(value):
        each = getattr(value, field.name)
        if dataclasses.is_dataclass(each):
            continue  # how positions turn costs nothing
        found[field.name] = each
    return found


def _described(device: torch.device, config: EngineConfig, storage: Storage) -> dict[str, Any]:
    """Describe a device: name, kind, threads, compute dtype, and its ceilings if they have been measured."""
    if device.type == "cpu":
        dtype = "float32" if storage.activation == 32 else "bfloat16"
        here = dataclasses.replace(detect("cpu"), units=config.cpu_threads())
    else:
        dtype = {"auto": "bfloat16"}.get(config.dtype, config.dtype)
        here = detect(str(device))
    found: dict[str, Any] = {"kind": device.type, "name": here.name, "threads": here.units, "dtype": dtype}
    known = kept(here)
    if known is not None and dtype in known.ceilings.flops_per_second:
        found["bytes_per_second"] = known.ceilings.read_bytes_per_second
        found["flops_per_second"] = known.ceilings.rate(dtype)
        found["host_bytes_per_second"] = known.ceilings.host_to_device_bytes_per_second
    return found
