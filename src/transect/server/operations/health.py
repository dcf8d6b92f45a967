"""Report the engine's state in /health and /metrics. Neither waits long: a hung engine must not hang its own alarm."""

from __future__ import annotations

import asyncio
import os

from ..openai.replies import Health
from ..serving import PROBE_S, Serving


async def health_of(serving: Serving) -> Health:
    """Return the state of engine and server as one word.

    A dead engine counts more than a hung one, and that more than a server that is draining.
    """
    report = await serving.engine.health()
    state, detail = report.state, report.detail
    if state == "ok" and serving.draining:
        state, detail = "draining", "finishing what has been accepted; no new requests"
    return Health(
        state=state,
        detail=detail,
        in_flight=serving.in_flight,
        server_pid=os.getpid(),
        engine_pids=list(report.pids),
    )


async def scrape(serving: Serving) -> bytes:
    """Write all metrics in Prometheus' text format.

    Where the engine does not answer in time its last known numbers are shown, with ``transect_engine_up`` at 0.
    """
    collector = serving.metrics.engine
    try:
        async with asyncio.timeout(PROBE_S):
            collector.take(await serving.engine.stats())
        collector.up = True
    except Exception:
        collector.up = False
    return serving.metrics.render()
