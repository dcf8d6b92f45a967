"""The ceilings of a device of this machine: measured when it is quiet, then kept in the user's cache.

One JSON file for each device, driver and build of torch, in ``hardware/`` of ``$TRANSECT_CACHE`` (or of
``~/.cache/transect``). It says when it was measured and how busy the machine was. A file that cannot be read, or that
another version of this module wrote, means measuring again; so does one from a busy machine, once that is quieter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..costs.ceilings import Ceilings
from .cache import cache_folder
from .device import Device
from .load import QUIET, cpu_load, gpu_load, wait_until_quiet

log = logging.getLogger(__name__)

FORMAT = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """Ceilings, and the conditions of their measurement.

    Attributes:
        ceilings: measured rates. On a CPU the rate of float32 is that of torch's matrix product or of plain
            multiply-adds, whichever is higher.
        at: date and time (ISO 8601, UTC).
        load: share of the device's time that others used just before.
        torch: version and build of torch.
        multiply_adds: FLOP/s of multiply-adds on registers, on a processor where they were measured.
    """

    ceilings: Ceilings
    at: str
    load: float
    torch: str
    multiply_adds: float | None = None

    @property
    def busy(self) -> bool:
        """True if other work used so much of the device that the ceilings may be too low."""
        return self.load > QUIET

    def __str__(self) -> str:
        state = f"while the machine was {self.load:.0%} busy" if self.busy else "on a quiet machine"
        return f"measured on {self.at[:10]} with torch {self.torch} {state}"


def cache_file(device: Device) -> Path:
    """Return the file for one device: its name, and a digest of name, driver and versions."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or "device"
    digest = hashlib.sha256(device.key.encode()).hexdigest()[:10]
    return cache_folder() / "hardware" / f"{name}-{digest}.json"


def ceilings(device: Device, *, again: bool = False) -> Ceilings:
    """Return the ceilings of ``device``, see ``measurement``."""
    return measurement(device, again=again).ceilings


def measurement(
    device: Device, *, again: bool = False, multiply_adds: Callable[[], float] | None = None
) -> Measurement:
    """Return the measurement of ``device`` from the cache; measure it (seconds) if there is none.

    Args:
        again: measure in any case, and replace the cached values.
        multiply_adds: measures a processor's rate of multiply-adds, in FLOP/s (``ops/cpu/ceilings.py``).
    """
    path = cache_file(device)
    before = None if again else kept(device)
    if before is not None and before.busy and _load(device) < before.load / 2:
        found = _best(before, _measure(device, multiply_adds))
    elif before is None:
        found = _measure(device, multiply_adds)
    elif multiply_adds is not None and before.multiply_adds is None:
        found = _with_multiply_adds(before, multiply_adds())
    else:
        return before
    _write(path, device, found)
    return found


def kept(device: Device) -> Measurement | None:
    """Return the cached measurement of ``device``, even of a busy machine; None if there is none."""
    return _read(cache_file(device), device)


def _measure(device: Device, multiply_adds: Callable[[], float] | None) -> Measurement:
    from . import cpu, gpu  # an engine only reads what was measured

    load = wait_until_quiet(lambda: _load(device))
    if load > QUIET:
        log.warning(
            "%s is %.0f%% busy with other work: the ceilings measured now may be too low, and are measured again when "
            "it is quieter",
            device.name,
            100 * load,
        )
    limits = cpu.measure() if device.kind == "cpu" else gpu.measure(f"cuda:{device.index}")
    found = Measurement(limits, datetime.now(UTC).isoformat(timespec="seconds"), load, device.torch)
    return found if multiply_adds is None else _with_multiply_adds(found, multiply_adds())


def _load(device: Device) -> float:
    return cpu_load() if device.kind == "cpu" else gpu_load(device.uuid)


def _with_multiply_adds(found: Measurement, rate: float) -> Measurement:
    rates = dict(found.ceilings.flops_per_second)
    rates["float32"] = max(rates.get("float32", 0.0), rate)
    return replace(found, ceilings=replace(found.ceilings, flops_per_second=rates), multiply_adds=rate)


def _best(before: Measurement, now: Measurement) -> Measurement:
    """Return the new measurement, with better values of the old one: a busy machine can only measure too little."""
    old, new = before.ceilings, now.ceilings
    better: dict[str, Any] = {
        "flops_per_second": {
            name: max(rate, old.flops_per_second.get(name, 0.0)) for name, rate in new.flops_per_second.items()
        }
    }
    for field in dataclasses.fields(Ceilings):
        values = [value for value in (getattr(old, field.name), getattr(new, field.name)) if value is not None]
        if field.name.endswith("_per_second") and field.name != "flops_per_second" and values:
            better[field.name] = max(values)
        elif field.name == "launch_seconds" and values:
            better[field.name] = min(values)
    return replace(now, ceilings=replace(new, **better))


def _write(path: Path, device: Device, found: Measurement) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": FORMAT, "key": device.key, **asdict(found)}, indent=1) + "\n")
    temporary.replace(path)


def _read(path: Path, device: Device) -> Measurement | None:
    try:
        kept = json.loads(path.read_text())
        if kept.pop("format") != FORMAT or kept.pop("key") != device.key:
            return None
        found = Measurement(**{**kept, "ceilings": Ceilings(**kept["ceilings"])})
        limits = found.ceilings
        numbers = (limits.read_bytes_per_second, limits.copy_bytes_per_second, *limits.flops_per_second.values())
        whole = all(float(number) > 0 for number in numbers) and 0 <= float(found.load) <= 1 and found.at
        return found if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
