"""The configuration that a launcher runs with: the one found by ``tools/search.py`` for this device and size, or a
rule.

Choices live in ``tuned/<device>.json`` of this folder (shipped) and of the user's cache (``$TRANSECT_CACHE`` or
``~/.cache/transect``), which wins. A file maps a launcher's name to size buckets, and a bucket to its knobs. Buckets
are powers of two: a row of 3000 elements belongs to bucket ``4096``, a product of 8 x 6144 x 4096 to ``8x8192x4096``.

Batch-invariant operators leave the user's findings aside (``own=False``) where a knob decides the order of a sum: two
machines of one kind then compute the same bits, whatever was tuned on either.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..hardware.cache import cache_folder
from ..hardware.targets import acted_target

log = logging.getLogger(__name__)
SHIPPED = Path(__file__).parent / "tuned"

Config = Mapping[str, Any]
Size = int | tuple[int, ...]


def user_folder() -> Path:
    """Return the folder for findings of this user."""
    return cache_folder() / "tuned"


def file_name(name: str) -> str:
    """Convert ``NVIDIA H200`` to ``nvidia_h200.json``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".json"


def device_name(device: torch.device | None = None) -> str:
    """Return the name under which findings of a GPU are kept; one that acts as another target has its own."""
    acted = acted_target()
    return torch.cuda.get_device_name(device) + (f" as {acted.name}" if acted is not None else "")


def bucket(size: int) -> int:
    """Return the power of two that holds ``size``."""
    return 1 << max(0, size - 1).bit_length()


def bucket_name(size: Size) -> str:
    """Return the key of a size in a file: its bucket, or those of a tuple's elements with ``x`` between them."""
    return "x".join(str(bucket(part)) for part in (size if isinstance(size, tuple) else (size,)))


@cache
def choices(name: str, own: bool = True) -> Mapping[str, Mapping[str, Config]]:
    """Load all known choices of a device: shipped ones, overridden by the user's own unless ``own`` is False."""
    merged: dict[str, dict[str, Config]] = {}
    for folder in (SHIPPED, *([user_folder()] if own else [])):
        for launcher, buckets in _read(folder / file_name(name)).items():
            merged.setdefault(launcher, {}).update(buckets)
    if not merged:
        log.warning("no tuned kernel configurations for %s: rules of thumb are used (`transect tune OP`)", name)
    return merged


@cache
def choose(launcher: str, size: Size, device: torch.device, rule: Callable[[Any], Config], own: bool = True) -> Config:
    """Return the configuration of a launcher at a size: ``rule(size)``, overlaid by what was found for its bucket.

    So a file that is older than a knob is still of use. ``own``: see ``choices``.
    """
    if device.type == "cuda":
        found = choices(device_name(device), own).get(launcher, {}).get(bucket_name(size))
        if found is not None:
            return {**rule(size), **found}
    return rule(size)


def _read(path: Path) -> dict[str, dict[str, Config]]:
    """Return the choices of a file; none, and a warning, where it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())["choices"]
        return {launcher: {size: dict(config) for size, config in found[launcher].items()} for launcher in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s) and is ignored; `transect tune OP` writes a new one", path, error)
        return {}


def save(name: str, findings: Mapping[str, Mapping[str, Config]], folder: Path | None = None) -> Path:
    """Add findings to a device's file (the user's unless ``folder`` is given); returns its path."""
    path = (folder or user_folder()) / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {"device": name, "choices": _read(path)}
    for launcher, buckets in findings.items():
        known["choices"].setdefault(launcher, {}).update(buckets)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    return path


def row_rule(width: int) -> Config:
    """Choose whole rows in registers: 16 elements a thread, several narrow rows to a program. The choice depends on the
    width alone."""
    block = bucket(width)
    rows = max(1, 2048 // block)
    return {"rows": rows, "warps": min(16, max(1, rows * block // 512))}


def flat_rule(n: int) -> Config:
    """Choose knobs for elementwise kernels: 16 bytes of a half type a thread and access, two accesses in flight."""
    return {"block": 2048, "warps": 4}
