"""Reading a JSON body: bounded while it arrives, whatever its headers claim, and parsed strictly.

The route class below is FastAPI's documented way to put an own ``Request`` under every handler of a router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar, get_type_hints

import msgspec
import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from ...text.grammar.fair_pool import FairPool
from .bounds import TOO_DEEP, check_depth, check_numbers, check_values, may_have_long_numbers
from .errors import ApiError, from_validation
from .lanes import in_lane

# A client that is still sending cannot read the answer, so an oversized body is read on and thrown away up to this
# many times the limit; beyond that the connection is simply closed.
PATIENCE = 8
LARGE = 64 * 1024
"""Bytes above which a body is checked in a thread, so that the event loop can serve others meanwhile."""
MODEL = "transect.body"
"""The key of the body's model in a request's scope."""
T = TypeVar("T")
_large: ContextVar[int] = ContextVar("transect_large_body", default=0)
"""Bytes of the body in the task of a request with a large one, else 0."""
_lanes = FairPool(2, "transect-body", time.thread_time)
"""Threads for large bodies. More of them would only compete with the event loop for Python's lock."""


class BoundedRequest(Request):
    """A request whose body may be ``app.state.serving.options.max_body_bytes`` long and must be JSON."""

    async def body(self) -> bytes:
        """Read the whole body.

        Raises:
            ApiError: 413 where it is too long, however it was framed.
        """
        if not hasattr(self, "_body"):
            limit: int = self.app.state.serving.options.max_body_bytes
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                if size > PATIENCE * limit:
                    break
                if size <= limit:
                    chunks.append(chunk)
            if size > limit:
                message = f"the body is longer than this server's limit of {limit} bytes: send a shorter one"
                raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        """Parse the body as JSON: UTF-8 only, no NaN or Infinity, no lone surrogates.

        Raises:
            ApiError: 400 with the place where it breaks, for more than MAX_DEPTH levels, and for whole numbers beyond
                64 bits; 413 where it holds too many values.
        """
        body = await self.body()
        check_values(body)
        _large.set(len(body) if len(body) > LARGE else 0)
        if _large.get():  # FastAPI takes an instance of the model as it is
            return await in_lane(_lanes, len(body), _checked, body, self.scope.get(MODEL))
        return _parsed(body)


async def aside(work: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return the result of ``work``, which processes the whole body: run in a thread if the body is large."""
    size = _large.get()
    return await in_lane(_lanes, size, work, *arguments, **options) if size else work(*arguments, **options)


def _checked(body: bytes, model: type[BaseModel] | None) -> Any:
    """Parse a body as an instance of the model, or as plain values if there is no model. Raises ApiError, 400."""
    value = _parsed(body)
    if model is None:
        return value
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(RequestValidationError(error.errors(include_url=False))) from None


def _parsed(body: bytes) -> Any:
    """Parse a body as plain values. Raises ApiError as ``BoundedRequest.json`` does."""
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        if "recursion limit" not in str(error):
            raise _refusal(body, str(error)) from None
        value = _nested(body)
    if may_have_long_numbers(body):
        check_numbers(value)
    return value


def _nested(body: bytes) -> Any:
    """Parse JSON with more levels than pydantic's parser reads. Raises ApiError as ``BoundedRequest.json`` does."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise TOO_DEEP from None
    except ValueError as error:
        raise _refusal(body, str(error)) from None
    check_depth(value)
    return value


def _refusal(body: bytes, reason: str) -> ApiError:
    """Build the error for a body that cannot be parsed."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return ApiError(400, "the body is not valid UTF-8: send JSON encoded as UTF-8", code="invalid_utf8")
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


class JsonRoute(APIRoute):
    """A route whose handler gets a ``BoundedRequest``, and refuses bodies that are not declared as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with the request replaced."""
        handler = super().get_route_handler()
        model = get_type_hints(self.endpoint).get("body")

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
            if request.method == "POST" and not (kind == "application/json" or kind.endswith("+json")):
                message = f"send the body as JSON with the header Content-Type: application/json, not {kind or 'none'}"
                raise ApiError(415, message, code="unsupported_media_type")
            request.scope[MODEL] = model
            return await handler(BoundedRequest(request.scope, request.receive))

        return handle
