"""``GET /live``: what an engine does now, as server-sent events, for the page and for programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from ..http.clients import current_client
from ..http.errors import ApiError
from ..http.sse import EventStream
from ..serving import Serving
from .bills import NOT_YOURS
from .live import EngineWatch, Watches, deltas_of
from .live_reader import LiveReader

CHECK_S = 0.5
"""Seconds between looks whether the server is shutting down."""
BYE = b'data: {"type":"bye"}\n\n'
LIVE: dict[int | str, dict[str, Any]] = {
    404: {"description": "no such engine, or it keeps no log"},
    429: {"description": "too many readers"},
}
live_routes = APIRouter(tags=["operations"])


@live_routes.get("/live", responses=LIVE)
async def live(request: Request, engine: int = 0, follow: str = "") -> Response:
    """Stream an engine's steps, queue and KV blocks, some ten times a second, until the client leaves.

    An operator sees all requests, other clients their own. ``follow``: id of a request whose bill is sent as it grows.
    The first event is the present state (``"type": "state"``), the others are changes (``"tick"``). ``"down"``: the
    engine has ended. ``"bye"``: the server shuts down.
    """
    serving: Serving = request.app.state.serving
    watches: Watches = request.app.state.watches
    if follow and not serving.owners.may_see(follow):
        raise ApiError(404, NOT_YOURS, param="follow", code="request_not_found")
    watch = watches.of(engine)
    reader = LiveReader(watch, engine, watches.count, current_client(), follow)
    alone = watches.count == 1
    source = reader.events(deltas_of(watch))
    return EventStream(until_the_end(serving, source, watch if alone else None), done=BYE, turns=serving.turns)


async def until_the_end(
    serving: Serving, events: AsyncIterator[bytes], alone: EngineWatch | None = None
) -> AsyncIterator[bytes]:
    """Yield events until the server drains: a page that watches must not delay that.

    ``alone``: watch of the only engine, whose end is the server's.
    """
    async with aclosing(events) as source:  # type: ignore[type-var]
        following = asyncio.ensure_future(anext(source))
        try:
            while not (serving.draining or serving.handed_over):
                await asyncio.wait((following,), timeout=CHECK_S)
                if following.done():
                    yield following.result()
                    if alone is not None and alone.death is not None:
                        return
                    following = asyncio.ensure_future(anext(source))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
