"""``FleetPolicy``: the autoscaling policy of a fleet's replicas, run by Ray Serve's controller."""

from __future__ import annotations

import logging
import time
from typing import Any

from transect.cluster.scaling import Decider
from transect.engine.scheduling.policies.scaling import Seen

log = logging.getLogger("ray.serve")


class FleetPolicy:
    """Called by the controller in each of its rounds; decides once in each interval.

    Args:
        arguments: of ``Decider``.
    """

    def __init__(self, **arguments: Any) -> None:
        self._decider = Decider(**arguments)
        self._was_blind = False

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        now = time.time()
        decider = self._decider
        here = int(context.target_num_replicas)
        if decider.last is not None and not decider.due(now):
            return decider.last.replicas, {}
        seen, missing = seen_of(context)
        decision = decider.decide(now, seen, here, missing)
        if decision.replicas != here:
            log.warning("transect: fleet: from %d to %d replicas: %s", here, decision.replicas, decision.reason)
        if decision.blind != self._was_blind:
            self._was_blind = decision.blind
            if decision.blind:
                log.error("transect: error: the autoscaler is blind: %s", decision.reason)
            else:
                log.warning("transect: fleet: the autoscaler sees all replicas again")
        return decision.replicas, {}


def seen_of(context: Any) -> tuple[Seen | None, int]:
    """Return the fleet as a policy sees it, and the number of replicas without metrics. None if all are without."""
    running = len(context.running_replicas)
    values = {name: list(by.values()) for name, by in (context.aggregated_metrics or {}).items()}
    known = len(values.get("queued_tokens", ()))
    if not known:
        return None, running
    rates = [each for each in values.get("tokens_per_s", ()) if each > 0]
    seen = Seen(
        at=time.monotonic(),
        ready=running,
        starting=max(0, int(context.target_num_replicas) - running),
        waiting=round(sum(values.get("waiting", ()))),
        running=round(sum(values.get("running", ()))),
        kv=sum(values.get("kv", (0.0,))) / known,
        rate=max(values.get("rate", (0.0,))),
        queued_tokens=round(sum(values["queued_tokens"])),
        tokens_per_s=sum(rates) / len(rates) if rates else 0.0,
    )
    return seen, max(0, running - known)
