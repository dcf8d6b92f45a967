"""Every error leaves the server in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

``ApiError`` is the one exception that the handlers raise. The functions below turn what can go wrong elsewhere
(routing, validation, a layer below) into it, so that a client never sees another shape and never a traceback.
"""

from __future__ import annotations

import difflib
import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

log = logging.getLogger("transect.server")

MAX_NAME = 60
"""Most characters of a client's name or value that an error message quotes."""
MAX_MESSAGE = 1000

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    """Description of an error, and the field at fault if there is one."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error to be answered to the client.

    Args:
        status: HTTP status.
        message: one sentence that says what to change.
        param: the request field to blame, if it is one.
        code: OpenAI's machine-readable code, such as ``context_length_exceeded``.
        headers: extra response headers, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = shortened(message, MAX_MESSAGE)
        super().__init__(status_code=status, detail=message, headers=dict(headers or {}))
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body; also the payload of an error event in the middle of a stream."""
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return ErrorBody(
            error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        ).model_dump()

    def response(self) -> JSONResponse:
        """Build the whole HTTP response."""
        return JSONResponse(self.body, status_code=self.status_code, headers=dict(self.headers or {}))


def shortened(text: str, most: int = MAX_NAME) -> str:
    """Shorten a client's text for an error message."""
    return text if len(text) <= most else text[: most - 3] + "..."


class _Shown(reprlib.Repr):
    """``repr`` of the beginning of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = MAX_NAME

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 256 else "a number of more than 76 digits"


def nearest(name: str, choices: Iterable[str]) -> str:
    """Suggest the choice closest to ``name`` as ``"; did you mean 'x'?"``; empty if none is close."""
    match = difflib.get_close_matches(name.lower(), list(choices), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def bad_value(message: str, fields: Iterable[str]) -> ApiError:
    """Convert a ``ValueError`` of the layers below to a 400. The message begins with the field at fault, if there is
    one."""
    first = message.split(maxsplit=1)[0].split("[")[0] if message else ""
    return ApiError(400, message, param=first if first in fields else None)


def path_of(location: Sequence[str | int]) -> str:
    """Write ``("body", "messages", 0, "content")`` as ``messages[0].content``."""
    text = ""
    for part in location[1:] if location and location[0] == "body" else location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            part = shortened(part)
            text += f".{part}" if text else part
    return text


def from_validation(error: RequestValidationError) -> ApiError:
    """Convert the first of pydantic's errors to one sentence about one field."""
    first = error.errors()[0]
    kind, path = str(first["type"]), path_of(first["loc"])
    field = path.split(".")[0].split("[")[0] or None
    context = first.get("ctx") or {}
    if kind == "unknown_field":
        where = f" in {path}" if path else ""
        return ApiError(400, f"{first['msg']}{where}", param=context["name"], code="unknown_parameter")
    if kind == "unsupported_field":
        return ApiError(400, str(first["msg"]), param=context["name"], code="unsupported_parameter")
    if not path:
        return ApiError(400, 'the body must be a JSON object, such as {"model": "...", "max_tokens": 64}')
    if kind == "too_short":
        return ApiError(
            400, f"{path} is empty: give at least {context['min_length']}", param=field, code="invalid_value"
        )
    if kind == "missing":
        return ApiError(400, f"{path} is required", param=field, code="missing_required_parameter")
    if kind == "shape":
        return ApiError(400, f"{path} {first['msg']}", param=field, code="invalid_type")
    got = shortened(_Shown().repr(first.get("input")))
    reason = str(first["msg"])
    return ApiError(400, f"{path}: {reason[:1].lower()}{reason[1:]}, got {got}", param=field, code="invalid_value")


def from_http(error: HTTPException, request: Request) -> ApiError:
    """Convert routing's own errors (unknown route, wrong method) to the same shape."""
    if isinstance(error, ApiError):
        return error
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"there is no route {where}; /docs lists them", code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow", "another method")
        message = f"{where} is not possible; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def install(app: FastAPI) -> None:
    """Install the handlers by which ``app`` answers every exception in the shape above."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _shaped(from_http(error, request), request)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return _shaped(from_validation(error), request)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback; the client gets no part of it.
        return _shaped(
            ApiError(500, "internal error; the server's log has the details", code="internal_error"), request
        )


def _shaped(error: ApiError, request: Request) -> JSONResponse:
    """Write an error in OpenAI's shape; on Anthropic's routes also with the fields that Anthropic's clients read."""
    response = error.response()
    if request.url.path.startswith("/v1/messages"):
        return JSONResponse({"type": "error", **error.body}, error.status_code, dict(error.headers or {}))
    return response
