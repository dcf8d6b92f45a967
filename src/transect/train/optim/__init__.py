"""Optimizers: plain objects that own the state of named parameters and can hand it to a checkpoint.

* ``base.py``: what they share: groups, master weights, the global norm of the gradient, state in and out.
* ``adamw.py``: AdamW. ``adamw8bit.py``: the same with moments in 8 bits. ``muon.py``: Muon for matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..config import OptimizerConfig
from .adamw import AdamW
from .adamw8bit import AdamW8bit
from .base import Optimizer
from .muon import Muon

__all__ = ["AdamW", "AdamW8bit", "Muon", "Optimizer", "build"]


def build(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    *,
    master_weights: bool = False,
    seed: int = 0,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Optimizer:
    """The optimizer that ``config`` names, over the parameters that it is to change; ``seed`` is that of the run, and
    ``shapes`` are as in ``Optimizer``."""
    kind = {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": Muon}[config.name]
    return kind(config, parameters, master_weights=master_weights, seed=seed, shapes=shapes)
