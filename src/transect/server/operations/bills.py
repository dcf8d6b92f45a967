"""Bills of requests (time by cause), and recent decisions of the scheduler (``explain/``)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from ...engine.scheduling.decisions import DecisionRing
from ...explain.engine.bill import bill
from ...explain.engine.log import bare_id, build
from ...explain.engine.rates import rates_for
from ...explain.engine.work import StepWork
from ..http.clients import check_operator
from ..http.errors import ApiError
from ..serving import Serving

NOT_YOURS = "this key has made no such request, or it ended too long ago; the operator's key sees all"
FOR_OPERATORS: dict[int | str, dict[str, Any]] = {403: {"description": "for the operator's key"}}
bills = APIRouter(tags=["operations"], responses={404: {"description": "no such request, or it ended too long ago"}})


def _rings(request: Request, past: bool = False) -> list[DecisionRing]:
    """Return the decision log of each engine that has run a step. ``past``: those of replaced engines too."""
    engine = request.app.state.serving.engine
    rings = [getattr(each, "decisions", None) for each in getattr(engine, "engines", (engine,))]
    rings += getattr(engine, "past_decisions", ()) if past else ()
    found = [ring for ring in rings if ring is not None and ring.header]
    if not found:
        raise ApiError(404, "this engine keeps no log of decisions, or has run no step yet", code="no_decisions")
    return found


@bills.get("/v1/requests/{request_id}/bill")
async def request_bill(request: Request, request_id: str, choice: int = 0) -> dict[str, Any]:
    """Return the parts of a request's time, in milliseconds; they add up to the whole. Ids are those of answers.

    A request that was continued in another engine has one bill for all engines that had it.
    """
    serving: Serving = request.app.state.serving
    if not serving.owners.may_see(request_id):
        raise ApiError(404, NOT_YOURS, param="request_id", code="request_not_found")
    rings = _rings(request, past=True)
    name = bare_id(request_id).encode()

    def work() -> dict[str, Any]:
        having = [ring for ring in rings if name in bytes(ring)]  # reading the records of all takes long
        logs = [build(ring.records(), complete=not ring.lost) for ring in having or rings[:1]]
        logs = [log for log in logs if log.has(request_id)] or logs[:1]
        logs.sort(key=lambda log: log.life(request_id).added.at if log.has(request_id) else 0.0)
        works = [(log, StepWork.of(log.header, rates_for(log.header, measure=False))) for log in logs]
        found = bill(logs[-1], request_id, works[-1][1], choice, works[:-1])
        return {"object": "request.bill", **found.to_dict(), "text": "\n".join(found.lines())}

    try:
        return await asyncio.to_thread(work)
    except ValueError as error:
        raise ApiError(404, str(error), param="request_id", code="request_not_found") from None


@bills.get("/v1/decisions", responses=FOR_OPERATORS)
async def decisions(request: Request, engine: int = 0) -> Response:
    """Return the newest records of an engine's decision log, as a file that ``transect explain`` reads.

    Headers: a flag that no record was dropped since the start, seconds since the newest record, and the number of
    engines.
    """
    check_operator()
    rings = _rings(request)
    if not 0 <= engine < len(rings):
        raise ApiError(404, f"engine must be 0 to {len(rings) - 1}, got {engine}", param="engine")
    ring = rings[engine]
    headers = {
        "X-Decisions-Complete": "false" if ring.lost else "true",
        "X-Decisions-Idle": f"{time.monotonic() - ring.touched:.3f}",
        "X-Decisions-Engines": str(len(rings)),
    }
    return Response(bytes(ring), media_type="application/octet-stream", headers=headers)
