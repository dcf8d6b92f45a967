"""Rates for the floors of a log: a preset's, or those measured on this machine."""

from __future__ import annotations

from typing import Any

from ...costs.floors import Rates
from ...costs.presets import preset
from ...engine.scheduling.decisions import Header


def rates_for(header: Header, name: str | None = None, *, measure: bool = True) -> Rates | None:
    """Return the rates of a log's device, or of the preset ``name``; None if they are unknown.

    Args:
        measure: measure (seconds, with torch) if the log has no rates and was made on this machine.

    Raises:
        ValueError: there is no such preset.
    """
    device = header.device
    dtype = str(device.get("dtype", "bfloat16"))
    if name is not None:
        ceilings = preset(name).ceilings()
        return Rates.of(ceilings, dtype if dtype in ceilings.flops_per_second else "float32")
    if "bytes_per_second" in device:
        link = device.get("host_bytes_per_second")
        return Rates(device["bytes_per_second"], device["flops_per_second"], str(device["name"]), link)
    return _measured(device, dtype) if measure and header.model and device else None


def _measured(device: dict[str, Any], dtype: str) -> Rates | None:
    import torch

    from ...hardware.device import detect
    from ...ops.cpu.ceilings import device_measurement

    kind = str(device.get("kind"))
    before = torch.get_num_threads()
    try:
        if kind == "cpu":
            torch.set_num_threads(int(device["threads"]))
        here = detect(kind)
        if here.name != device.get("name"):
            return None
        return Rates.of(device_measurement(here).ceilings, dtype)
    except ValueError:
        return None
    finally:
        torch.set_num_threads(before)
