"""Searches a launcher's knobs on the device: every combination at one shape, and what each knob is worth."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ..registry import Case, Knobs
from .bench import ROTATE_BYTES
from .timing import time_graph


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration and its median seconds."""

    config: Mapping[str, int]
    seconds: float


def search(knobs: Knobs, case: Case) -> tuple[int, list[Trial]]:
    """(size that the launcher keys on, trials from the fastest); configurations that do not compile are left out."""
    sample = case.make(torch.device("cuda"), 0)
    size = knobs.size(sample)
    nbytes = sum(v.nbytes for v in sample.values() if isinstance(v, torch.Tensor))
    prepared = [knobs.prepare(case.make(torch.device("cuda"), s)) for s in range(max(2, ROTATE_BYTES // nbytes))]
    fixed = knobs.heuristic(size)
    names = [name for name in knobs.choices if name in fixed]
    trials = []
    for values in itertools.product(*(knobs.choices[name] for name in names)):
        config = dict(zip(names, values, strict=True))
        try:
            times = time_graph([partial(knobs.launch, **p, config=config) for p in prepared], replays=7)
        except (RuntimeError, torch.OutOfMemoryError):
            continue
        trials.append(Trial(config, statistics.median(times)))
    return size, sorted(trials, key=lambda trial: trial.seconds)


def worth(trials: list[Trial]) -> dict[str, float]:
    """For each knob: how much slower the best trial gets with that knob alone at its worst value (1.0: nothing)."""
    best = trials[0]
    found = {}
    for name in best.config:
        others = {k: v for k, v in best.config.items() if k != name}
        same = [t.seconds for t in trials if all(t.config[k] == v for k, v in others.items())]
        found[name] = max(same) / best.seconds
    return found
