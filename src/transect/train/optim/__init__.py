"""Optimizers: plain objects that own the state of named parameters and can hand it to a checkpoint.

* ``base.py``: what they share: groups, master weights, the global norm of the gradient, state in and out.
* ``adamw.py``: AdamW. ``adamw8bit.py``: the same with moments in 8 bits. ``lamb.py``: LAMB, for large
  batches. ``muon.py``: Muon for matrices.
* ``onebit.py``: 1-bit Adam, whose ranks exchange signs; ``onebit_lamb.py``, ``zero_one.py``: 1-bit LAMB, 0/1 Adam.
* ``offloaded.py``: AdamW whose states are in host memory or on a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from ..config import OptimizerConfig
from .base import Optimizer

if TYPE_CHECKING:
    from .offloaded import Offload

__all__ = ["Optimizer", "build"]
KINDS: Mapping[str, str] = {
    "adamw": "adamw.AdamW",
    "adamw8bit": "adamw8bit.AdamW8bit",
    "lamb": "lamb.Lamb",
    "muon": "muon.Muon",
    "onebit_adam": "onebit.OneBitAdam",
    "onebit_lamb": "onebit_lamb.OneBitLamb",
    "zero_one_adam": "zero_one.ZeroOneAdam",
}
"""Modules and classes by name. A run loads only the module of its optimizer."""


def build(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    *,
    master_weights: bool = False,
    seed: int = 0,
    shapes: Mapping[str, Sequence[int]] | None = None,
    offload: Offload | None = None,
) -> Optimizer:
    """Build the optimizer that ``config`` names, over the parameters to be updated; ``seed`` is that of the run, and
    ``shapes`` are as in ``Optimizer``. With ``offload`` it is AdamW with offloaded states."""
    if offload is not None:
        from .offloaded import OffloadedAdamW

        return OffloadedAdamW(config, parameters, offload, master_weights=master_weights, seed=seed, shapes=shapes)
    module, _, name = KINDS[config.name].partition(".")
    kind: type[Optimizer] = getattr(import_module(f".{module}", __package__), name)
    return kind(config, parameters, master_weights=master_weights, seed=seed, shapes=shapes)
