"""Bills of requests (time by cause), and recent decisions of the scheduler (``explain/``)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from ...engine.scheduling.decisions import DecisionRing
from ...explain.engine.bill import bill
from ...explain.engine.log import build
from ...explain.engine.rates import rates_for
from ...explain.engine.work import StepWork
from ..http.clients import check_operator
from ..http.errors import ApiError
from ..serving import Serving

NOT_YOURS = "this key has made no such request, or it ended too long ago; the operator's key sees all"
FOR_OPERATORS: dict[int | str, dict[str, Any]] = {403: {"description": "for the operator's key"}}
bills = APIRouter(tags=["operations"], responses={404: {"description": "no such request, or it ended too long ago"}})


def _rings(request: Request) -> list[DecisionRing]:
    """Return the decision log of each engine that has run a step."""
    serving: Serving = request.app.state.serving
    engines = getattr(serving.engine, "engines", (serving.engine,))
    rings = [getattr(engine, "decisions", None) for engine in engines]
    found = [ring for ring in rings if ring is not None and ring.header]
    if not found:
        raise ApiError(404, "this engine keeps no log of decisions, or has run no step yet", code="no_decisions")
    return found


@bills.get("/v1/requests/{request_id}/bill")
async def request_bill(request: Request, request_id: str, choice: int = 0) -> dict[str, Any]:
    """Return the parts of a request's time, in milliseconds; they add up to the whole. Ids are those of answers."""
    serving: Serving = request.app.state.serving
    if not serving.owners.may_see(request_id):
        raise ApiError(404, NOT_YOURS, param="request_id", code="request_not_found")
    rings = _rings(request)

    def work() -> dict[str, Any]:
        refusal: ValueError | None = None
        for ring in rings:
            log = build(ring.records(), complete=not ring.lost)
            try:
                found = bill(log, request_id, StepWork.of(log.header, rates_for(log.header, measure=False)), choice)
            except ValueError as error:
                refusal = error
                continue
            return {"object": "request.bill", **found.to_dict(), "text": "\n".join(found.lines())}
        assert refusal is not None
        raise refusal

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
