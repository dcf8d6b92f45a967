"""Drills of a fleet, predicted: the capacity that a failure costs and the latency that it adds.

The same requests run through a simulated fleet twice, calm and disturbed (``disturbances.py``). The times after which
failures are noticed, and parts come back, come from the fleet's settings and from measurements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..bench.traces.asked import Asked
from ..engine.frontends.looks import WATCH_S
from .disturbances import Disturbance, HangUp, Kill, Leave, Roll, RouterDeath
from .fleet import EngineModel, Fleet, FleetRun


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimes:
    """Seconds that parts of a fleet take.

    Attributes:
        noticed: from the death of an engine until the router knows of it.
        engine: start of an engine by its host.
        ordered: from an order to scale down or to roll until the cluster carries it out: a replica gets no more
            requests, or a new one begins to start.
        replica: start of a whole replica by the cluster, until the router has linked it; ``inf`` if there is no room.
        hung_after: silence of an engine after which its host kills it.
        lost_after: silence of a host after which the router gives it up.
        linked: from the end of a host's silence until the replica takes requests again.
        router: from the router's death until another one takes requests.
        drain: longest time for the streams of a replica that leaves.
    """

    noticed: float = 0.05
    ordered: float = 1.0
    engine: float = 10.0
    replica: float = 15.0
    hung_after: float = 20.0
    lost_after: float = 10.0
    linked: float = 0.2
    router: float = 6.0
    drain: float = 60.0


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of a drill.

    Attributes:
        p99: 99th percentile of the times of requests that were answered, in seconds. added_p99: the same, less that
            of the calm run.
        lost: replica-seconds in which a replica that should serve did not, up to the last arrival.
        dropped: requests that were broken off or refused.
    """

    p99: float
    added_p99: float
    lost: float
    dropped: int = 0


Cause = Callable[[FleetTimes, float, int], tuple[Sequence[Disturbance], float]]
"""From the times of a fleet, the moment and the replica that is hit: the disturbances, and the seconds for which a
replica is lost."""


def _killed(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    back = times.noticed + WATCH_S / 2 + times.engine
    return [Kill(at, hit, back, times.noticed)], back


def _stopped(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    noticed = times.hung_after + WATCH_S / 2 + times.noticed
    back = noticed + WATCH_S / 2 + times.engine
    return [Kill(at, hit, back, noticed)], back


def _silent(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    noticed = times.lost_after + WATCH_S / 2
    return [Kill(at, hit, noticed + times.linked, noticed)], noticed + times.linked


def _lost(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    back = times.noticed + times.replica
    return [Kill(at, hit, back, times.noticed)], back


def _rolled(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    return [Roll(at + times.ordered, times.replica, times.drain)], 0.0


def _fewer(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    return [Leave(at + times.ordered, hit, times.drain)], 0.0


def _router(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    return [RouterDeath(at, times.router)], times.router


def _nothing(times: FleetTimes, at: float, hit: int) -> tuple[Sequence[Disturbance], float]:
    return [], 0.0


DRILLS: Mapping[str, tuple[str, Cause, bool]] = {
    "kill": ("an engine is killed", _killed, True),
    "stopped": ("an engine is half alive", _stopped, True),
    "host": ("a host is silent, and wakes when it is given up", _silent, True),
    "actor": ("a host is killed, and the cluster starts another replica", _lost, True),
    "node": ("a node with one replica is lost", _lost, True),
    "roll": ("all replicas are replaced", _rolled, False),
    "cancelled": ("scale-down by one replica while clients leave", _fewer, True),
    "controller": ("the cluster's controller is killed", _nothing, False),
    "blind": ("metrics are cut off from the autoscaler", _nothing, False),
    "router": ("the router is killed", _router, False),
}
"""By name: title, cause, and True if one replica is hit. Streams do not pass through a cluster's controller or its
metrics, so drills without a disturbance change nothing."""


def p99(run: FleetRun) -> float:
    """Return the 99th percentile of the times of whole requests, in seconds."""
    return percentile([each.ended - each.due for each in run.records])


def percentile(times: Sequence[float]) -> float:
    """Return the 99th percentile of at least two times."""
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def predict(
    model: EngineModel,
    replicas: int,
    asked: Sequence[Asked],
    times: FleetTimes,
    at: float,
    drills: Sequence[str] = tuple(DRILLS),
    leaving: Mapping[int, float] | None = None,
) -> dict[str, Effect]:
    """Predict the effects of drills. Of a drill that hits one replica it is the mean over the replicas.

    Args:
        model: of each replica's engine.
        asked: requests.
        at: seconds at which each drill begins.
        leaving: in the drill ``cancelled``, the second at which the client of a request, by its number, leaves.

    Raises:
        ValueError: there is no such drill, or a request can never fit into an engine.
    """
    if unknown := sorted(set(drills) - set(DRILLS)):
        raise ValueError(f"there is no drill {unknown[0]!r}: choose from {', '.join(DRILLS)}")
    calm = Fleet(model, replicas).run([each for number, each in enumerate(asked) if number not in (leaving or {})])
    found = {}
    for name in drills:
        effects = []
        for hit in range(replicas if DRILLS[name][2] else 1):
            events, lost = DRILLS[name][1](times, at, hit)
            if name == "cancelled" and leaving:
                events = [*events, *(HangUp(each, frozenset({number})) for number, each in leaving.items())]
            lost = min(lost, asked[-1].at - at) * (1 if DRILLS[name][2] else replicas)
            run = Fleet(model, replicas, events=events).run(asked) if events else calm
            after = p99(run) if len(run.records) > 1 else math.nan
            effects.append((after, after - p99(calm), lost, run.dropped))
        after, added, lost, dropped = (statistics.fmean(each) for each in zip(*effects, strict=True))
        found[name] = Effect(after, added, lost, round(dropped))
    return found
