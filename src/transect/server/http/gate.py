"""Pass every HTTP request through counting, draining, API keys and X-Request-Id before its handler.

Plain ASGI, without buffering.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..operations import request_log
from ..sender import begin_request
from ..serving import Serving
from .clients import Client, Clients
from .errors import ApiError

OPEN = ("/health", "/metrics", "/ping")
"""Routes for load balancers and scrapers: no key needed, and answered while draining. They show no user data."""
METRICS = "/metrics"
PAGES = ("/docs", "/openapi.json", "/page/")
"""Routes of the API's description and of the page: a browser sends no key, and they reveal no user data."""
MOST_ID = 128
"""Most characters of an X-Request-Id."""


SHOWN = (
    ("release", b"x-transect-release"),
    ("version", b"x-transect-version"),
    ("captured", b"x-transect-captured"),
)
"""Facts of a request's log line that its answer has as headers, percent-encoded."""


def request_id(scope: Scope) -> bytes:
    """Return the client's X-Request-Id if it is safe to send back and to log; else a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if 0 < len(given) <= MOST_ID and all(0x21 <= byte <= 0x7E for byte in given) else uuid4().hex.encode()


DRAINING = ApiError(
    503,
    "the server is shutting down: send the request to another one, or again in a moment",
    code="draining",
    headers={"Connection": "close", "Retry-After": "5"},
)


UNKNOWN = ApiError(
    401,
    "a valid API key is needed: send it as 'Authorization: Bearer <key>'",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def _closing(send: Send) -> Send:
    """Have the client open another connection for its next request."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return sending


class Gate:
    """ASGI middleware in front of the whole app."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app, self.serving = app, serving
        self._clients = Clients(serving.options.keys, serving.options.admin_api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        root = self.serving.options.root_path
        if root:
            scope["root_path"] = root  # routes are found with it before them and without
        if self.serving.handed_over:
            send = _closing(send)
        status = 500
        scope.setdefault("state", {})["arrival"] = asyncio.get_running_loop().time()
        name = request_id(scope)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
                timing = request_log.server_timing(facts)
                if timing is not None:
                    message["headers"].append((b"server-timing", timing))
                message["headers"] += [
                    (header, quote("yes" if facts[fact] is True else facts[fact]).encode())
                    for fact, header in SHOWN
                    if fact in facts
                ]
            await send(message)

        path = scope["path"].removeprefix(root)
        client = self._clients.of(scope)
        begin_request()
        shut = path == METRICS and self.serving.options.protect_metrics
        if path in OPEN and not (shut and client is None):
            await self.app(scope, receive, send)
            return
        self.serving.enter()
        began, facts, entered = time.monotonic(), request_log.begin(), False
        if client is not None and client.has_key:
            request_log.note(client=client.name)
        if self.serving.tracing is not None:
            self.serving.tracing.begin(scope["headers"])
        try:
            refusal = DRAINING if self.serving.draining else None
            if client is None and path != "/" and not path.startswith(PAGES):
                refusal = refusal or UNKNOWN
            if refusal is None and client is not None and scope["method"] == "POST":
                refusal = self._enter(client)
                entered = refusal is None
            if refusal is None:
                await self.serving.turns.wait()
                await self.app(scope, receive, counted)
            else:
                await refusal.response()(scope, receive, counted)
        finally:
            self.serving.leave()
            if entered and client is not None:
                self.serving.accounts.leave(client)
            # The route's own path is the label, never the client's text: labels must stay few.
            route = getattr(scope.get("route"), "path", "other")
            self.serving.metrics.responses.labels(route, str(status)).inc()
            seconds = time.monotonic() - began
            request_log.end(scope["method"], scope["path"][:200], status, seconds, name.decode(), facts)

    def _enter(self, client: Client) -> ApiError | None:
        """Count a request of a client; return the error if the client is at a limit."""
        try:
            self.serving.accounts.enter(client)
        except ApiError as error:
            return error
        return None
