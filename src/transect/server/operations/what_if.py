"""``POST /v1/decisions/what-if``: predict an engine's recent load under other settings of its scheduler.

A process of its own, with low priority, replays the log: the server's process has streams to send, and an engine on the
CPU has tokens to draw.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from ..http.body import JsonRoute
from ..http.clients import check_operator
from ..http.errors import ApiError
from ..openai.protocol import Body
from .bills import FOR_OPERATORS, decision_rings

LOG_BYTES = 2**20
"""Newest part of the log that is replayed."""
PATIENCE_S = 120.0
WORKER = "transect.explain.engine.what_if"
REFUSED: dict[int | str, dict[str, Any]] = {
    404: {"description": "no such engine, or it keeps no log"},
    429: {"description": "another prediction runs"},
    503: {"description": "the replay takes too long"},
}
what_if_routes = APIRouter(route_class=JsonRoute, tags=["operations"], responses=FOR_OPERATORS | REFUSED)
_running = asyncio.Semaphore(1)


class WhatIfBody(Body):
    """Settings to change, as of ``transect explain replay --set``."""

    set: Annotated[dict[str, Any], Field(max_length=32)]
    engine: int = 0


@what_if_routes.post("/v1/decisions/what-if")
async def predict(request: Request, body: WhatIfBody) -> dict[str, Any]:
    """Predict latencies and speed of the recent requests with other settings. For the operator's key.

    Returns what ``transect explain replay --set ... --json`` prints. One prediction runs at a time.
    """
    check_operator()
    rings = decision_rings(request)
    if not 0 <= body.engine < len(rings):
        raise ApiError(404, f"engine must be 0 to {len(rings) - 1}, got {body.engine}", param="engine")
    if _running.locked():
        raise ApiError(429, "another prediction runs: try again when it has ended", headers={"Retry-After": "5"})
    async with _running:
        return await _predicted(*rings[body.engine].newest(LOG_BYTES), body.set)


async def _predicted(log: bytes, whole: bool, changes: dict[str, Any]) -> dict[str, Any]:
    settings = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", WORKER, "whole" if whole else "part", *settings),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            out, problem = await process.communicate(log)
    except TimeoutError:
        raise ApiError(503, f"the replay takes more than {PATIENCE_S:.0f} s", code="replay_too_long") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        message = problem.decode(errors="replace").strip().rpartition("\n")[2][:500]
        raise ApiError(400, message or "the replay failed", param="set", code="no_prediction")
    found: dict[str, Any] = json.loads(out)
    return found
