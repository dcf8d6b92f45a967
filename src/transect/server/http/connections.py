"""Connections with bounds: how many there are, and how long a client may take to send a request.

uvicorn reads HTTP; what is added here is what it leaves open. A head (request line and headers) must arrive within a
time, a body at a rate, or the connection ends with a 408. Beyond ``Limits.connections`` only /health and /metrics are
answered, a little beyond that connections are closed at once: descriptors are left for the engine, files and probes.
What is not HTTP is a 400 in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .errors import ApiError
from .gate import OPEN

log = logging.getLogger("transect.server")

KEPT_BACK = 128
"""Descriptors reserved for other uses than clients: the engine's socket and pipes, workers, files."""
SPARE = 32
"""Connections beyond the limit that may still ask for /health."""
MOST_DESCRIPTORS = 65536
BODY_BYTES_PER_S = 16 * 1024
"""Bytes of a body that extend its time limit by one second."""
REPEAT_S = 60.0
"""Seconds between log lines about a continuing shortage."""


@dataclass(frozen=True)
class Limits:
    """Limits on clients.

    Attributes:
        connections: number open at the same time.
        receive_s: seconds for a request's head, and for the beginning of its body.
    """

    connections: int
    receive_s: float


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as allowed, up to ``MOST_DESCRIPTORS``; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def most_connections(asked: int | None) -> int:
    """Return the limit of connections that descriptors allow, or the requested limit if that is lower."""
    allowed = max(1, raise_descriptor_limit() - KEPT_BACK - SPARE)
    return allowed if asked is None else min(asked, allowed)


class Connection(H11Protocol):
    """One client's connection.

    Args:
        limits: shared by all of them.
        settings: as uvicorn gives them.
    """

    def __init__(self, limits: Limits, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._in_body = False
        """True if the timer runs for a request's body, False for its head."""
        self._began = 0.0
        """Start of the timed part, on the loop's clock."""
        self._received = 0
        """Bytes of the request received so far."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Open(transport))  # type: ignore[arg-type]
        count = len(self.connections)
        if count > self._limits.connections + SPARE:
            transport.close()
            return
        if count > self._limits.connections:
            self.app = _Crowded(self.app, self._limits.connections)  # type: ignore[arg-type, assignment]
        self._wait_for(in_body=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    @property
    def receiving(self) -> bool:
        """True while a part of a request is still to arrive. A connection that waits for its next request is not
        receiving."""
        return self._timer is not None

    @property
    def idle(self) -> bool:
        """True between two requests."""
        return not self.receiving and (self.cycle is None or self.cycle.response_complete)

    @property
    def silent(self) -> bool:
        """True before the first byte of the first request."""
        return self.cycle is None and self._received == 0

    def refuse(self, error: ApiError) -> None:
        """Answer the partly received request, if no answer has begun, and close the connection."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        begun = self.conn.their_state is not h11.IDLE or self._has_part_of_head
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *((name.encode(), value.encode()) for name, value in (error.headers or {}).items()),
            ]
            if "Connection" not in (error.headers or {}):
                headers.append((b"Connection", b"close"))
            status = error.status_code
            response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not HTTP; called by uvicorn."""
        self.refuse(
            ApiError(
                400, "this is not a valid HTTP/1.1 request: check its first line and its headers", code="invalid_http"
            )
        )

    @property
    def _has_part_of_head(self) -> bool:
        return bool(self.conn.trailing_data[0])

    def _follow(self) -> None:
        """Start the timer for the part of a request that is being received, if any."""
        state = self.conn.their_state
        if self.transport.is_closing():
            self._stop_timer()
        elif state is h11.SEND_BODY:
            if self._timer is None or not self._in_body:
                self._wait_for(in_body=True)
        elif state is h11.IDLE and self._has_part_of_head:
            if self._timer is None or self._in_body:
                self._wait_for(in_body=False)
        else:
            self._stop_timer()
            self._received = 0

    def _wait_for(self, *, in_body: bool) -> None:
        self._stop_timer()
        self._in_body, self._began = in_body, self.loop.time()
        self._timer = self.loop.call_later(self._limits.receive_s, self._is_over)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_over(self) -> None:
        seconds = self._limits.receive_s
        left = self._began + seconds + self._received / BODY_BYTES_PER_S - self.loop.time()
        if self._in_body and left > 0:
            self._timer = self.loop.call_later(left, self._is_over)
            return
        part = "body" if self._in_body else "head"
        text = f"the {part} of the request did not arrive in time ({seconds:g} s, more for a long body): send it again"
        self.refuse(ApiError(408, text, code="receive_timeout"))


class _Open:
    """A transport that discards writes after the connection has ended. Until the app notices the end, in the next pass
    of the event loop, asyncio would log a warning for each write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Crowded:
    """The app for connections beyond the limit."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        message = (
            f"the server has {self._limit} connections, the most that it takes: send the request again in a moment"
        )
        headers = {"Connection": "close", "Retry-After": "1"}
        await ApiError(503, message, code="too_many_connections", headers=headers).response()(scope, receive, send)


def refuse_half_sent(connections: set[Any], error: ApiError) -> None:
    """Answer every client that is still sending a request, so that shutdown does not wait for it."""
    for connection in list(connections):
        if isinstance(connection, Connection) and connection.receiving:
            connection.refuse(error)


def log_shortages_rarely(
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Build a handler for the event loop's exceptions. Without free descriptors every attempt to accept fails,
    thousands of times a second; the handler logs that once, and then once a minute."""
    last: float | None = None

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        error = context.get("exception")
        if not (isinstance(error, OSError) and "socket.accept()" in context.get("message", "")):
            loop.default_exception_handler(context)
            return
        now = clock()
        if last is None or now - last >= REPEAT_S:
            last = now
            log.error(
                "transect: error: connections cannot be accepted (%s): raise the limit of open files (ulimit -n), or "
                "lower --max-connections",
                error.strerror,
            )

    return handle
