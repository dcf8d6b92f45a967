"""The fleet in ``/metrics``, and its state for operators: ``GET /v1/fleet``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..server.http.clients import check_operator
from .scaling import BLIND, is_blind, newest

routes = APIRouter(tags=["operations"], responses={403: {"description": "for the operator's key"}})


@routes.get("/v1/fleet")
async def fleet_state(request: Request) -> dict[str, Any]:
    """Return the replicas of the fleet, and the newest decisions about their number. Needs the operator's key."""
    check_operator()
    return state_of(request.app.state.serving.engine)


def state_of(fleet: Any) -> dict[str, Any]:
    """Return the state of a fleet as plain values."""
    settings = fleet.settings
    decisions = newest(settings.place, 5)
    return {
        "object": "fleet",
        "name": settings.name,
        "replicas": fleet.replicas(),
        "requests_per_s": round(fleet.rate, 3),
        "handed_over": fleet.handed_over,
        "refused_links": fleet.refused,
        "decisions": decisions,
        "alarms": [BLIND] if blind(fleet) else [],
    }


def blind(fleet: Any) -> bool:
    """Return True if the autoscaler of a fleet cannot see; not in the first two intervals."""
    interval = fleet.settings.scaling.interval_s
    if time.monotonic() - fleet.began < 2 * interval:
        return False
    return is_blind(next(iter(newest(fleet.settings.place)), None), interval)


class FleetCollector:
    """Metrics of each replica, as known to the router."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape; called by prometheus-client."""
        fleet = self._fleet
        replicas = fleet.replicas()
        states = GaugeMetricFamily("transect_fleet_replicas", "Replicas of the fleet, by state", labels=["state"])
        for state in ("ready", "leaving"):
            states.add_metric([state], sum(each["state"] == state for each in replicas))
        yield states
        for name, text, key in (
            ("transect_fleet_queued_tokens", "Tokens that a replica still has to compute", "queued_tokens"),
            ("transect_fleet_streams", "Requests that a replica has", "streams"),
            ("transect_fleet_tokens_per_second", "Highest measured rate of a busy replica", "tokens_per_s"),
        ):
            family = GaugeMetricFamily(name, text, labels=["replica"])
            for each in replicas:
                if each["state"] != "gone":
                    family.add_metric([each["name"]], float(each[key]))
            yield family
        for name, text, count in (
            ("transect_fleet_handed_over", "Requests that continued on another replica", fleet.handed_over),
            ("transect_fleet_refused_links", "Connections of replicas that were refused", fleet.refused),
        ):
            yield CounterMetricFamily(name, text, value=count)
        last = next(iter(newest(fleet.settings.place)), None)
        if last is not None:
            text = "Replicas that the autoscaler wants"
            yield GaugeMetricFamily("transect_fleet_wanted_replicas", text, value=float(last["replicas"]))
        alarm = GaugeMetricFamily("transect_fleet_alarm", "1 while an alarm of the fleet is raised", labels=["name"])
        alarm.add_metric([BLIND], float(blind(fleet)))
        yield alarm
