"""The learning rate over the steps of a run, as a factor: a pure function, so that a resumed run cannot drift.

Sources: cosine: Loshchilov & Hutter 2016, arXiv:1608.03983; warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395.
"""

from __future__ import annotations

import math

from ..config import ScheduleConfig

WARMUP = 0.03
"""Share of the steps that ``schedule.warmup = -1`` means."""


def factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the factor for ``learning_rate`` at ``step`` (from 0) of a run of ``steps``.

    The first of w warm-up steps runs at 1 / w, so that no step is spent at 0.
    """
    warmup = round(WARMUP * steps) if schedule.warmup < 0 else schedule.warmup
    if step < warmup:
        return (step + 1) / warmup
    span = max(1, steps - warmup)
    done = min(1.0, (step - warmup) / span)
    if schedule.kind == "cosine":
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.kind == "linear":
        return 1 - (1 - schedule.final) * done
    if schedule.kind == "wsd" and schedule.decay:
        left = max(0, steps - step)
        return schedule.final + (1 - schedule.final) * min(1.0, left / schedule.decay)
    return 1.0
