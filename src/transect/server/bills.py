"""Where the time of requests went: their bills, and what the scheduler decided of late (``explain/``)."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from ..engine.decisions import DecisionRing
from ..explain.bill import bill
from ..explain.log import build
from ..explain.rates import rates_for
from ..explain.work import StepWork
from .errors import ApiError
from .serving import Serving

bills = APIRouter(tags=["operations"], responses={404: {"description": "no such request, or it ended too long ago"}})


def _ring(request: Request) -> DecisionRing:
    serving: Serving = request.app.state.serving
    ring: DecisionRing | None = getattr(serving.engine, "decisions", None)
    if ring is None or not ring.header:
        raise ApiError(404, "this engine keeps no log of decisions, or has run no step yet", code="no_decisions")
    return ring


@bills.get("/v1/requests/{request_id}/bill")
async def request_bill(request: Request, request_id: str, choice: int = 0) -> dict[str, Any]:
    """The parts of a request's time, in milliseconds; they add up to the whole. Ids are those of answers."""
    ring = _ring(request)

    def work() -> dict[str, Any]:
        log = build(ring.records(), complete=not ring.lost)
        found = bill(log, request_id, StepWork.of(log.header, rates_for(log.header, measure=False)), choice)
        return {"object": "request.bill", **found.to_dict(), "text": "\n".join(found.lines())}

    try:
        return await asyncio.to_thread(work)
    except ValueError as error:
        raise ApiError(404, str(error), param="request_id", code="request_not_found") from None


@bills.get("/v1/decisions")
async def decisions(request: Request) -> Response:
    """The newest records of the decision log, as a file that ``transect explain`` reads."""
    ring = _ring(request)
    headers = {"X-Decisions-Complete": "false" if ring.lost else "true"}
    return Response(bytes(ring), media_type="application/octet-stream", headers=headers)
