"""The ceilings of a device of this machine: measured once, then kept in the user's cache.

One JSON file for each device, driver and version of torch, in ``hardware/`` of ``$TRANSECT_CACHE`` (or of
``~/.cache/transect``). A file that cannot be read, or that another version of this module wrote, means measuring again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

from . import cpu, gpu
from .cache import cache_folder
from .ceilings import Ceilings
from .device import Device

FORMAT = 1


def cache_file(device: Device) -> Path:
    """The file for one device: its name, and a digest of name, driver and versions."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or "device"
    digest = hashlib.sha256(device.key.encode()).hexdigest()[:10]
    return cache_folder() / "hardware" / f"{name}-{digest}.json"


def ceilings(device: Device, *, again: bool = False) -> Ceilings:
    """The ceilings of ``device``, from the cache; measured (seconds) when they are not there, or with ``again``."""
    path = cache_file(device)
    kept = None if again else _read(path, device)
    if kept is not None:
        return kept
    found = cpu.measure() if device.kind == "cpu" else gpu.measure(f"cuda:{device.index}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": FORMAT, "key": device.key, "ceilings": asdict(found)}, indent=1) + "\n")
    temporary.replace(path)
    return found


def _read(path: Path, device: Device) -> Ceilings | None:
    try:
        kept = json.loads(path.read_text())
        if kept["format"] != FORMAT or kept["key"] != device.key:
            return None
        found = Ceilings(**kept["ceilings"])
        numbers = (found.read_bytes_per_second, found.copy_bytes_per_second, *found.flops_per_second.values())
        return found if numbers and all(float(number) > 0 for number in numbers) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
