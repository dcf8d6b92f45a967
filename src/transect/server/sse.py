"""Server-sent events: one response whose end is always well-formed."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .disconnect import ClientGone, unless_disconnected
from .errors import ApiError

log = logging.getLogger("transect.server")

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each object as one ``data:`` event, then ``data: [DONE]``, exactly once.

    An error in the middle becomes one error event in OpenAI's shape, followed by the end. Where the client goes away
    the iterator is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[BaseModel]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await unless_disconnected(receive, self._send(send))
        except (ClientGone, OSError):
            log.debug("the client went away in the middle of a stream")

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in events:
                    payload = event.model_dump_json().encode()
                    await send({"type": "http.response.body", "body": b"data: " + payload + b"\n\n", "more_body": True})
            except OSError:
                raise
            except ApiError as error:
                await self._error(send, error)
            except Exception:
                log.exception("a stream failed")
                await self._error(send, ApiError(500, "internal error; the server's log has the details"))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    @staticmethod
    async def _error(send: Send, error: ApiError) -> None:
        payload = json.dumps(error.body).encode()
        await send({"type": "http.response.body", "body": b"data: " + payload + b"\n\n", "more_body": True})
