"""Server-sent events: one response whose end is always well-formed.

A stream sends a chunk for every token, so what a chunk costs is what a busy server is made of. ``event`` writes any
chunk; ``TextEvents`` writes those that differ in nothing but their text, which is nearly all, without building them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .lifetime import ClientGone, unless_disconnected
from .turns import ArrivalGate

log = logging.getLogger("transect.server")

DONE = b"data: [DONE]\n\n"
PLACE = "<the text of this chunk>"
CONTINUED = b": continued by another replica, whose numbers may differ in the last bits\n\n"
"""Comment of the stream, which clients ignore; ``usage.continued`` carries the same information."""


def event(chunk: BaseModel) -> bytes:
    """Write a chunk as an event."""
    return b"data: " + chunk.model_dump_json().encode() + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Write an event with a name, for APIs with several kinds of events."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class Raw:
    """A body that is plain data already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def model_dump_json(self) -> str:
        """Return the body as JSON text, like pydantic's method of this name."""
        return msgspec.json.encode(self._value).decode()


class TextEvents:
    """Events that equal the event of ``chunk`` except for its text, which is ``PLACE``."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: BaseModel) -> None:
        # The last place: names that a user chose stand before the text.
        self._before, _, self._after = event(chunk).rpartition(json.dumps(PLACE).encode())

    def event(self, text: str) -> bytes:
        """Write the event with this text."""
        return self._before + msgspec.json.encode(text) + self._after


class EventStream(Response):
    """Sends events (bytes, from ``event`` or ``TextEvents``) as they come, then ``done``, exactly once.

    An error in the middle becomes one error event in OpenAI's shape, followed by the end. Where the client goes away
    the iterator is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        done: bytes = DONE,
        failed: Callable[[ApiError], bytes] | None = None,
        turns: ArrivalGate | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._done, self._failed, self._turns = done, failed or _error_event, turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await unless_disconnected(receive, self._send(send), self._turns)
        except (ClientGone, OSError):
            log.debug("the client went away in the middle of a stream")

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for body in events:
                    if not body:
                        continue  # a token that is not text yet
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except OSError:
                raise
            except ApiError as error:
                await self._error(send, error)
            except Exception:
                log.exception("a stream failed")
                await self._error(send, ApiError(500, "internal error; the server's log has the details"))
        await send({"type": "http.response.body", "body": self._done, "more_body": False})

    async def _error(self, send: Send, error: ApiError) -> None:
        await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})


def _error_event(error: ApiError) -> bytes:
    return b"data: " + json.dumps(error.body).encode() + b"\n\n"
