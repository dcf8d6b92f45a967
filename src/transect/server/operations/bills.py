"""Bills of requests (time by cause), and recent decisions of the scheduler (``explain/``)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from ...engine.scheduling.decisions import DecisionRing
from ...explain.engine.bill import Bill, bill
from ...explain.engine.log import DecisionRunLog, bare_id, build
from ...explain.engine.rates import rates_for
from ...explain.engine.work import StepWork
from ..http.clients import check_operator
from ..http.errors import ApiError
from ..serving import Serving

NOT_YOURS = "this key has made no such request, or it ended too long ago; the operator's key sees all"
FOR_OPERATORS: dict[int | str, dict[str, Any]] = {403: {"description": "for the operator's key"}}
bills = APIRouter(tags=["operations"], responses={404: {"description": "no such request, or it ended too long ago"}})


def decision_rings(request: Request, past: bool = False) -> list[DecisionRing]:
    """Return the decision log of each engine that has run a step; ``past``: also the logs of replaced engines."""
    engine = request.app.state.serving.engine
    found = [each.decisions for each in _logged(engine)] + [*(getattr(engine, "past_decisions", ()) if past else ())]
    if not found:
        raise ApiError(404, "this engine keeps no log of decisions, or has run no step yet", code="no_decisions")
    return found


def _logged(engine: Any) -> list[Any]:
    """List the engines that keep a log and have run a step."""
    every = getattr(engine, "engines", (engine,))
    return [each for each in every if getattr(each, "decisions", None) is not None and each.decisions.header]


@bills.get("/v1/requests/{request_id}/bill")
async def request_bill(request: Request, request_id: str, choice: int = 0) -> dict[str, Any]:
    """Return the parts of a request's time, in milliseconds; they add up to the whole. Ids are those of answers.

    A request that was continued in another engine has one bill for all engines that had it. A search has one for each
    branch in ``parts``, and their tokens together.
    """
    serving: Serving = request.app.state.serving
    if not serving.owners.may_see(request_id):
        raise ApiError(404, NOT_YOURS, param="request_id", code="request_not_found")
    rings = decision_rings(request, past=True)
    name = bare_id(request_id).encode()

    def work() -> dict[str, Any]:
        having = [ring for ring in rings if name in bytes(ring)]  # reading the records of all takes long
        every = [build(ring.records(), complete=not ring.lost) for ring in having or rings[:1]]
        works = [(log, StepWork.of(log.header, rates_for(log.header, measure=False))) for log in every]
        parts = sorted({key for log in every for key in log.requests if key.startswith(f"{name.decode()}-")})
        if len(parts) < 2:
            found = _bill(works, request_id, choice)
            return {"object": "request.bill", **found.to_dict(), "text": "\n".join(found.lines())}
        bills = [
            _bill(works, part, each)
            for part in parts
            for each in range(next(log for log in every if log.has(part)).life(part).added.n)
        ]
        return {
            "object": "request.bill",
            "request_id": request_id,
            "prompt_tokens": sum(each.prompt_tokens for each in bills if each.choice == 0),
            "output_tokens": sum(each.output_tokens for each in bills),
            "parts": [each.to_dict() for each in bills],
            "text": "\n".join(line for each in bills for line in each.lines()),
        }

    try:
        return await asyncio.to_thread(work)
    except ValueError as error:
        raise ApiError(404, str(error), param="request_id", code="request_not_found") from None


def _bill(works: list[tuple[DecisionRunLog, StepWork]], name: str, choice: int) -> Bill:
    """Return the bill of an engine request over all engines that had it. Raises ValueError if none had."""
    having = [each for each in works if each[0].has(name)] or works[:1]
    having.sort(key=lambda each: each[0].life(name).added.at if each[0].has(name) else 0.0)
    return bill(having[-1][0], name, having[-1][1], choice, having[:-1])


@bills.get("/v1/decisions", responses=FOR_OPERATORS)
async def decisions(request: Request, engine: int = 0) -> Response:
    """Return the newest records of an engine's decision log, as a file that ``transect explain`` reads.

    Headers: a flag that no record was dropped since the start, seconds since the newest record, the number of
    engines, and the name of this one, if it is a replica of a fleet.
    """
    check_operator()
    rings = decision_rings(request)
    if not 0 <= engine < len(rings):
        raise ApiError(404, f"engine must be 0 to {len(rings) - 1}, got {engine}", param="engine")
    ring = rings[engine]
    headers = {
        "X-Decisions-Complete": "false" if ring.lost else "true",
        "X-Decisions-Idle": f"{time.monotonic() - ring.touched:.3f}",
        "X-Decisions-Engines": str(len(rings)),
    }
    one = _logged(request.app.state.serving.engine)[engine]
    if name := getattr(one, "name", ""):
        headers["X-Decisions-Engine"] = name if one.death is None else f"{name} (gone)"
    return Response(bytes(ring), media_type="application/octet-stream", headers=headers)
