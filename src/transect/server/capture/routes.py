"""``POST /v1/feedback``, and the operator's routes over captures."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from ..http.body import JsonRoute
from ..http.clients import check_operator
from ..http.errors import ApiError
from ..openai.protocol import Body
from ..serving import Serving
from .captures import Captures

capture_routes = APIRouter(route_class=JsonRoute, tags=["captures"])
_ID = re.compile(r"[0-9a-f]{32}")


class FeedbackRequest(Body):
    """``POST /v1/feedback``: a judgement of a captured answer; at least one of the last four.

    ``id`` is the id of the answer in any API; ``choice`` counts its choices from 0. ``correction`` is the answer that
    should have been given.
    """

    id: Annotated[str, Field(min_length=1, max_length=256)]
    choice: Annotated[int, Field(ge=0, le=65535)] = 0
    thumb: Literal["up", "down"] | None = None
    score: Annotated[float, Field(ge=0, le=1)] | None = None
    correction: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    comment: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


def _captures(request: Request) -> tuple[Serving, Captures]:
    serving: Serving = request.app.state.serving
    if serving.captures is None:
        message = "this server captures no answers: start it with --capture-dir"
        raise ApiError(404, message, code="no_captures")
    return serving, serving.captures


@capture_routes.post("/v1/feedback")
async def feedback(request: Request, body: FeedbackRequest) -> dict[str, Any]:
    """Keep a user's judgement of an answer beside the captured answer."""
    serving, captures = _captures(request)
    given = body.model_dump(include={"thumb", "score", "correction", "comment"}, exclude_none=True)
    if not given:
        message = "give at least one of thumb, score, correction and comment"
        raise ApiError(400, message, param="thumb", code="empty_feedback")
    found = _ID.search(body.id)
    if found is None:
        message = "id must be the id of an answer, such as chatcmpl-..."
        raise ApiError(400, message, param="id", code="invalid_value")
    known = await captures.feedback(found[0], body.choice, given)
    score = body.score if body.score is not None else {"up": 1.0, "down": 0.0}.get(body.thumb or "")
    if known.release:
        verdict = body.thumb or ("correction" if body.correction else "score" if body.score is not None else "comment")
        serving.releases.series(known.release, known.model).judged(verdict, score)
    return {"id": body.id, "object": "feedback", "choice": body.choice, "model": known.model}


@capture_routes.get("/v1/captures")
async def captures_state(request: Request) -> dict[str, Any]:
    """Return the state of captures. For the operator's key."""
    check_operator()
    serving, captures = _captures(request)
    options, recorder = serving.options, captures.recorder
    return {
        "object": "captures",
        "state": "stopped" if recorder.problem else "on",
        "problem": recorder.problem or None,
        "bytes": recorder.files.size(),
        "quota_bytes": options.capture_bytes,
        "days": options.capture_days,
        "rate": options.capture_rate,
        "consent": options.capture_consent,
    }


@capture_routes.delete("/v1/captures")
async def delete_captures(request: Request, user: str, client: str | None = None) -> dict[str, Any]:
    """Delete all captured requests, answers and feedback of a user. For the operator's key.

    ``client`` limits this to requests with the API key of this name.
    """
    check_operator()
    _, captures = _captures(request)
    if not user:
        raise ApiError(400, "user must be the id that requests were sent with", param="user", code="invalid_value")
    return {"object": "captures.deletion", "user": user, "deleted": await captures.delete(user, client)}
