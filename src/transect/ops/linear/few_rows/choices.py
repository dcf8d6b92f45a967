"""Which kernel runs a product of up to 256 rows: measured for a device, or else by its shape.

Files of choices are measured: those in ``ops/tuned/small_matmul`` are shipped, and ``transect tune MODEL``
writes the user's own, which win. ``benchmarks/ops/products_in_layers.py`` measured the shipped ones in chains of whole
layers, ``benchmarks/ops/many_rows.py`` those of the heads and of other sizes, ``benchmarks/ops/products_by_shape.py``
those of ten models at 48 rows, where the rule is furthest from the quickest. Without ``dependent_launch`` a launch may
read no weight early, so other choices apply then (``alone``). A size that no file has goes by ``rule.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ....hardware.device import target_of
from ....hardware.targets import KernelTarget
from ...lang.jit import multiprocessors
from ...tuning import SHIPPED, device_name, file_name, user_folder
from . import cuda, rule
from .cuda import CUDA_ROWS, CudaTiling, quicker
from .gluon import GluonTiling
from .hopper import MOST_ROWS, HopperTiling
from .triton import TritonTiling, portable_gate, portable_tiling

FOLDER = SHIPPED / "small_matmul"
"""One file for each measured device: which implementation runs a size, and its tiling."""
ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 160, 192, 208, 224, 256)
"""A look-up rounds the number of rows up to one of these."""
FEW = 16
"""Rows up to which ``small_matmul.cu`` runs every weight."""
MOST_GATED, MOST_STREAMS = 128, 64
"""Most rows of a gate, and of norms, beside Triton's products without bulk copies; with more their registers spill."""
OR_ELSE = {48: 64, 96: 128}
"""Number of rows whose choice is used where one of ``ROWS`` has none."""
TILINGS: Mapping[str, type] = {
    "hopper": HopperTiling, "cuda": CudaTiling, "triton": TritonTiling, "gluon": GluonTiling
}  # fmt: skip
"""Class of each kernel's tilings, by its name in a ``Choice``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernel runs a product of a size, and its tiling."""

    by: str
    """``hopper``, ``cuda`` (``small_matmul.cu``), ``triton``, ``gluon``, or ``cublas``, which is
    ``torch.nn.functional.linear``."""
    tiling: Any = None
    """Instance of the class that ``TILINGS`` has for ``by``; None if the kernel's own rule decides."""

    def __post_init__(self) -> None:
        if self.tiling is not None and type(self.tiling) is not TILINGS.get(self.by):
            raise TypeError(f"{self.tiling} is not a tiling of {self.by}")


def key(
    m: int, n: int, k: int, gated: bool = False, stream: bool = False, alone: bool = False, invariant: bool = False
) -> str:
    """Return the key of a size in a file of choices: rows rounded up to one of ``ROWS``, and the exact size of the
    weight. ``stream``: for ``stream_products.py``. ``alone``: for products outside a chain of layers. ``invariant``:
    for ``invariant.py``."""
    of = f"{' gated' * gated}{' stream' * stream}{' alone' * alone}{' invariant' * invariant}"
    return f"{_rounded(m)}x{n}x{k}{of}"


@cache
def choices(name: str) -> Mapping[str, Choice]:
    """Return the choices measured for a device, by ``key``: those shipped, overlaid by the user's own."""
    found: dict[str, Choice] = {}
    for folder in (FOLDER, user_folder() / FOLDER.name):
        path = folder / file_name(name)
        if path.is_file():
            found |= {size: read_choice(entry) for size, entry in json.loads(path.read_text())["choices"].items()}
    return found


def read_choice(entry: Mapping[str, Any]) -> Choice:
    """Return a choice from its form in a file."""
    by, tiling = entry["by"], entry.get("tiling")
    return Choice(by, None if tiling is None else TILINGS[by](**tiling))


@cache
def chosen(
    m: int, n: int, k: int, device: torch.device, gated: bool = False, stream: bool = False, alone: bool = False
) -> Choice | None:
    """Return the choice for m rows by a weight of n x k on this device; None for the callers' defaults.

    Above 192 rows, a choice measured with 256 rows is used for fewer only if its tiles skip missing rows (Triton's).
    ``alone``: the choice for a call by itself; if there is none, the one for a chain of layers.
    """
    if device.type != "cuda" or not 0 < m <= MOST_ROWS:
        return None
    known = choices(device_name(device))

    def of(rows: int) -> Choice | None:
        in_layers = known.get(key(rows, n, k, gated, stream))
        return known.get(key(rows, n, k, gated, stream, alone), in_layers)

    found = of(m)
    if found is None and (rows := _rounded(m)) in OR_ELSE:
        found = of(OR_ELSE[rows])
    if 224 < m < MOST_ROWS or (found is None and m > 192):
        of_all = of(MOST_ROWS)
        found = of_all if of_all is not None and of_all.by == "triton" else None
    return _by_rule(m, n, k, device, gated, stream, alone) if found is None else found


def _rounded(m: int) -> int:
    return next(rows for rows in ROWS if rows >= m)


def _by_rule(m: int, n: int, k: int, device: torch.device, gated: bool, stream: bool, alone: bool) -> Choice | None:
    """Return the choice for an unmeasured size on NVIDIA's GPUs since Ampere."""
    target = target_of(device)
    if target.capability < (8, 0) or k % 8 or n % 16:
        return None
    units = multiprocessors(device)
    if not target.hopper:  # products without norm and gate go by small_matmul.best_launcher
        return _portable(m, n, k, target, units, gated, stream) if gated or stream else None
    if stream or m <= FEW:  # rules of small_matmul.cu decide; here only what else its launches do
        takes = (m == 1 and k % 64 == 0) if stream else gated
        return Choice("cuda", cuda.choose_tiling(m, n, units)) if takes else None
    if alone or (m <= CUDA_ROWS and quicker(m, n, k)):
        return None
    tiling = rule.quickest(m, n, k, gated, units)
    if tiling is None:
        return None if gated else Choice("cublas")
    return Choice("hopper", tiling)


def _portable(m: int, n: int, k: int, target: KernelTarget, units: int, gated: bool, stream: bool) -> Choice | None:
    """Return the choice for a product with a gate or norms beside it where Hopper's kernels do not run. Launches do not
    overlap before Hopper, so each launch less saves more than there: norms are part of products of any few rows."""
    if quicker(m, n, k, target.block_bytes):
        return None if stream and k % 64 else Choice("cuda", cuda.choose_tiling(m, n, units, target.block_bytes))
    if target.bulk_copies or m > (MOST_STREAMS if stream else MOST_GATED):
        return None
    tiling = portable_gate(m, n, k, target) if gated else portable_tiling(m, n, k, target)
    return None if (n // 2 if gated else n) % tiling.bn else Choice("triton", tiling)
