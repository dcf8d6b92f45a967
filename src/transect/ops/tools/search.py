"""Searches a launcher's knobs on the device at one shape, and reports the gain of each knob.

It tries the heuristic's configuration first, which every other is compared with, then the one in use. So the result is
never slower than either. A candidate is rejected when it does not compile or run, when its result is not the
heuristic's up to rounding, or when its result differs between runs (a race). A GPU may be at its power limit for a part
of the search, and the fastest of many is the luckiest. So the fastest few are timed again, alternating with those two:
each after a pause, at the full clock, or under load (``under_load.py``). Those times count.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..registry import Case, Knobs
from ..tuning import bucket_name
from . import under_load
from .bench import EXPECTED, MOST_COPIES, REST_SECONDS, ROTATE_BYTES, sentence
from .timing import Calls, time_graph

REPEATS = 5
"""Runs whose bits must be equal."""
REPLAYS = 9
WORTH = 1.01
"""Least gain of a configuration that is kept.

Smaller gains are within the spread, and each kept one must be compiled.
"""
FINALISTS = 3
"""Number of the fastest that are timed again beside the heuristic's and the one in use."""
NEAR = 1.25
"""Ratio to the heuristic's time in a trial above which a configuration is not timed again."""
ROUNDING = 16
"""Largest difference from the heuristic's result, in units of the result's precision, in the 2-norm."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration: its median seconds, or why it was rejected."""

    config: Mapping[str, Any]
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A search at one shape."""

    launcher: str
    case: str
    bucket: str
    default: Mapping[str, Any]
    trials: Sequence[Trial]
    """The heuristic's first, the others in the order tried."""
    left: int
    """Configurations that the time limit left untried."""
    finals: Sequence[Trial] = ()
    """The heuristic's, the one in use and the fastest, timed again alternately; empty where nothing could win."""

    @property
    def best(self) -> Trial:
        """The fastest configuration that was not rejected, of the finals if there were any."""
        return _fastest(self.finals or self.trials)

    @property
    def gain(self) -> float | None:
        """The heuristic's time over the best's; None where the heuristic's did not run."""
        first = (self.finals or self.trials)[0].seconds
        return None if first is None else first / (self.best.seconds or 1.0)

    @property
    def choice(self) -> Mapping[str, Any]:
        """Configuration to use: the best, or the heuristic's if it is as good."""
        return self.best.config if self.gain is None or self.gain >= WORTH else self.default

    def worth(self) -> dict[str, float | None]:
        """Return, for each knob, the best time with it at its default over the best time with it free (1.0: no gain).

        None where no such trial ran.
        """
        best = _fastest(self.trials)
        found: dict[str, float | None] = {}
        for name in best.config:
            fixed = [t.seconds for t in self.trials if t.seconds and t.config[name] == self.default[name]]
            found[name] = min(fixed) / (best.seconds or 1.0) if fixed else None
        return found


def _fastest(trials: Sequence[Trial]) -> Trial:
    return min((t for t in trials if t.seconds is not None), key=lambda t: t.seconds or 0.0)


def configurations(knobs: Knobs, size: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (the heuristic's, every other one that makes sense at ``size``, shuffled the same way each time)."""
    fixed = dict(knobs.heuristic(size))
    names = [name for name in knobs.choices if name in fixed]
    default = {name: fixed[name] for name in names}
    everything = [dict(zip(names, v, strict=True)) for v in itertools.product(*(knobs.choices[n] for n in names))]
    others = [c for c in everything if c != default and (knobs.valid is None or knobs.valid(c, size))]
    random.Random(0).shuffle(others)
    return default, others


def search(
    knobs: Knobs,
    case: Case,
    device: str = "cuda",
    *,
    seconds: float = 60.0,
    in_use: Callable[[str, Any], Mapping[str, Any] | None] = lambda launcher, size: None,
    timer: Callable[[Calls, int], list[float]] = time_graph,
    race: Callable[[Sequence[Calls]], list[float]] | None = None,
) -> Found:
    """Try configurations at ``case`` until all are tried or ``seconds`` are over.

    Args:
        in_use: present configuration of a launcher at a size; tried right after the heuristic's, whatever the limit.
        timer: measures seconds of a call in each of several replays of a trial.
        race: measures seconds of a call of each finalist, as ``under_load.race``; None for alternating medians of
            ``timer``, each after a pause.

    Raises:
        ValueError: nothing ran, not even the heuristic's configuration.
    """
    place = torch.device(device)
    sample = case.make(place, 0)
    size = knobs.size(sample)
    default, others = configurations(knobs, size)
    kept = dict(in_use(knobs.name, size) or default)
    others.sort(key=lambda config: config != kept)  # stable
    nbytes = max(1, sum(v.nbytes for v in sample.values() if isinstance(v, torch.Tensor)))
    copies = max(2, min(MOST_COPIES, ROTATE_BYTES // nbytes)) if place.type == "cuda" else 1
    prepared = [knobs.prepare(sample), *(knobs.prepare(case.make(place, seed)) for seed in range(1, copies))]
    wanted: list[torch.Tensor] | None = None
    trials: list[Trial] = []
    begun = time.monotonic()
    queue = [default, *others]
    needed = 1 if kept not in others else 2
    while queue and (len(trials) < needed or time.monotonic() - begun < seconds):
        config = queue.pop(0)
        try:
            outputs = results(knobs, prepared[0], config)
            reason = _differs(outputs, wanted) if wanted is not None else ""
            reason = reason or _unsteady(knobs, prepared[0], config, outputs)
            if reason:
                trials.append(Trial(config, None, reason))
                continue
            wanted = wanted or outputs
            times = timer([partial(knobs.launch, **p, config=config) for p in prepared], REPLAYS)
            trials.append(Trial(config, statistics.median(times)))
        except EXPECTED as error:
            trials.append(Trial(config, None, sentence(error)))
            if place.type == "cuda":
                torch.cuda.synchronize()  # raises when the device is unusable from here on

    def rested(calls: Calls) -> float:
        if place.type == "cuda":
            time.sleep(REST_SECONDS)
        return statistics.median(timer(calls, REPLAYS))

    def again(configs: Sequence[Mapping[str, Any]]) -> list[float]:
        calls = [[partial(knobs.launch, **p, config=config) for p in prepared] for config in configs]
        return race(calls) if race else under_load.in_turns([partial(rested, each) for each in calls])

    if all(trial.seconds is None for trial in trials):
        raise ValueError(f"{knobs.name}, {case.name}: no configuration ran; the heuristic's: {trials[0].reason}")
    return Found(
        knobs.name,
        case.name,
        bucket_name(size),
        default,
        trials,
        len(queue),
        _finals(trials, needed, again, race is None),
    )


def _finals(
    trials: Sequence[Trial],
    given: int,
    again: Callable[[Sequence[Mapping[str, Any]]], list[float]],
    full_clock: bool,
) -> list[Trial]:
    """Return the first ``given`` (the heuristic's and the one in use) and the fastest with their times in a second
    race; none where nothing is near the heuristic's, or that did not run. ``full_clock``: that race is like the trials,
    so none either where the heuristic's was as fast as any."""
    first = trials[0].seconds
    ran = [trial for trial in trials if trial.seconds is not None]
    fastest = sorted(ran, key=lambda trial: trial.seconds or 0.0)[:FINALISTS]
    if first is None or (full_clock and first < WORTH * (fastest[0].seconds or 0.0)):
        return []
    near = [trial for trial in fastest if (trial.seconds or 0.0) <= NEAR * first]
    configs = [trial.config for trial in ran if trial in trials[:given] or trial in near]
    if len(configs) < 2:
        return []
    return [Trial(config, seconds) for config, seconds in zip(configs, again(configs), strict=True)]


def results(knobs: Knobs, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> list[torch.Tensor]:
    """Copy the results of one run, or its arguments if it returns nothing but writes into them."""
    made = knobs.launch(**arguments, config=config)
    listed = [made] if isinstance(made, torch.Tensor) else list(made or arguments.values())
    return [value.detach().clone() for value in listed if isinstance(value, torch.Tensor)]


def _unsteady(knobs: Knobs, arguments: Mapping[str, Any], config: Mapping[str, Any], first: list[torch.Tensor]) -> str:
    for _ in range(REPEATS - 1):
        again = results(knobs, arguments, config)
        if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(first, again, strict=True)):
            return "its result is not the same in every run"
    return ""


def _bits(x: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def _differs(outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> str:
    for a, b in zip(outputs, wanted, strict=True):
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return "its result is not that of the heuristic's configuration"
            continue
        both = a.isfinite() & b.isfinite()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return "NaN or infinities where the heuristic's configuration has none"
        off = (a.double() - b.double()).where(both, 0.0).norm()
        scale = b.double().where(both, 0.0).norm()
        if off > ROUNDING * torch.finfo(a.dtype).eps * scale:
            return f"its result is {float(off / scale):.1e} away from that of the heuristic's configuration"
    return ""


def cases_of(knobs: Knobs, cases: Sequence[Case], device: str, matching: str = "") -> list[Case]:
    """Return the first case of each size bucket that this launcher runs at, of those whose name contains
    ``matching``."""
    chosen: dict[str, Case] = {}
    for case in cases:
        if matching not in case.name:
            continue
        arguments = case.make(torch.device(device), 0)
        if knobs.applies is None or knobs.applies(arguments):
            chosen.setdefault(bucket_name(knobs.size(arguments)), case)
    return list(chosen.values())
