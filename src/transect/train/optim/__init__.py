"""Optimizers: plain objects that own the state of named parameters and can hand it to a checkpoint.

* ``base.py``: what they share: groups, master weights, the global norm of the gradient, state in and out.
* ``adamw.py``: AdamW. ``adamw8bit.py``: the same with moments in 8 bits. ``lamb.py``: LAMB, for large
  batches. ``muon.py``: Muon for matrices.
* ``onebit.py``: 1-bit Adam, whose ranks exchange signs; ``onebit_lamb.py``, ``zero_one.py``: 1-bit LAMB, 0/1 Adam.
* ``offloaded.py``: AdamW whose states are in host memory or on a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..config import OptimizerConfig
from .adamw import AdamW
from .adamw8bit import AdamW8bit
from .base import Optimizer
from .lamb import Lamb
from .muon import Muon
from .offloaded import Offload, OffloadedAdamW
from .onebit import OneBitAdam
from .onebit_lamb import OneBitLamb
from .zero_one import ZeroOneAdam

__all__ = [
    "AdamW",
    "AdamW8bit",
    "Lamb",
    "Muon",
    "Offload",
    "OffloadedAdamW",
    "OneBitAdam",
    "OneBitLamb",
    "Optimizer",
    "ZeroOneAdam",
    "build",
]
KINDS: Mapping[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "lamb": Lamb,
    "muon": Muon,
    "onebit_adam": OneBitAdam,
    "onebit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
}


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
        return OffloadedAdamW(config, parameters, offload, master_weights=master_weights, seed=seed, shapes=shapes)
    return KINDS[config.name](config, parameters, master_weights=master_weights, seed=seed, shapes=shapes)
