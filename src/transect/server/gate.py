"""What every HTTP request passes before its handler: counting, draining, API keys. Plain ASGI: no buffering."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .serving import Serving

OPEN = ("/health", "/metrics")
"""Routes for load balancers and scrapers: no key needed, and answered while draining. They show no user data."""


class Gate:
    """ASGI middleware in front of the whole app."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app, self.serving = app, serving
        self._keys = tuple(key.encode() for key in serving.options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        if scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        self.serving.enter()
        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self.app(scope, receive, counted)
            else:
                await refusal.response()(scope, receive, counted)
        finally:
            self.serving.leave()
            # The route's own path is the label, never the client's text: labels must stay few.
            route = getattr(scope.get("route"), "path", "other")
            self.serving.metrics.responses.labels(route, str(status)).inc()

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self.serving.draining:
            message = "the server is shutting down: send the request to another one, or again in a moment"
            return ApiError(503, message, code="draining", headers={"Connection": "close", "Retry-After": "5"})
        known = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        if self._keys and not self._known(known):
            message = "a valid API key is needed: send it as 'Authorization: Bearer <key>'"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _known(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every key is compared, each in constant time, so that the time taken tells nothing about them.
        return sum(hmac.compare_digest(given.strip(), key) for key in self._keys) > 0
