"""Fits the parts of a profiled run to the time that the same work took without profiling."""

from __future__ import annotations

from dataclasses import replace

from .gaps import Named
from .split import Split

SLOWED = {"launch": 0.8, "host": 0.35, "sync": 0.5, "loading": 0.35, "unrated": 0.2}
"""Parts that profiling lengthens (calls of operators, and Python), each with its largest share that can be overhead."""


def fit(split: Split, named: list[Named], plain: float) -> list[Named]:
    """Scale the parts so that all but "profiler" add up to ``plain`` seconds.

    Returns:
        ``named`` with times that fit.
    """
    parts = split.parts
    excess = split.own - plain
    split.measured = True
    before = dict(parts)
    slowed = {part: most * parts[part] for part, most in SLOWED.items() if parts[part] > 0}
    if excess > 0:
        taken = min(1.0, excess / (sum(slowed.values()) or 1.0))
        for part, seconds in slowed.items():
            parts[part] -= taken * seconds
        rest = sum(seconds for part, seconds in parts.items() if part != "profiler")
        for part in parts:  # the machine was slower meanwhile
            parts[part] *= 1.0 if part == "profiler" else plain / rest
    else:
        whole = sum(parts[part] for part in slowed)
        for part in slowed:
            parts[part] += -excess * parts[part] / whole
        parts["unexplained"] += 0.0 if slowed else -excess
    shrink = plain / split.own if split.own > 0 else 1.0
    parts["profiler"] = split.wall - plain
    if split.on_gpu:
        split.profiling = max(split.profiling, parts["profiler"])
    for op in split.ops:
        op.seconds *= min(1.0, shrink)
    ratio = {part: parts[part] / seconds for part, seconds in before.items() if seconds > 0}
    return [replace(each, seconds=each.seconds * ratio.get(each.doing.part, 1.0)) for each in named]
