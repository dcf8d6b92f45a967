"""Send the page's files: to everybody, since they hold no user data. What the page asks for needs the API key."""

from __future__ import annotations

import functools
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from ... import __version__
from ..http.clients import current_client
from ..http.errors import ApiError
from ..serving import Serving

FILES = Path(__file__).parent / "files"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".json": "application/json",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",  # set by the page; sanitized texts have no such attributes
        "img-src 'self' data: blob:",  # no pictures from elsewhere: their addresses could carry a chat away
        "font-src 'self'",
        "connect-src 'self' http: https:",  # the server to compare with
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy of the page: scripts come from files of this server only."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # browsers keep the files, and ask with the ETag for newer ones
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}

page = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class File:
    """A file as it is sent.

    Attributes:
        plain, compressed: bytes, as they are and with gzip.
        media_type: of Content-Type.
        tag: ETag, from the bytes.
    """

    plain: bytes
    compressed: bytes
    media_type: str
    tag: str


@functools.cache
def read_files() -> dict[str, File]:
    """Read and compress the page's files, by name."""
    found: dict[str, File] = {}
    for path in sorted(FILES.iterdir()):
        plain = path.read_bytes()
        tag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
        found[path.name] = File(plain, gzip.compress(plain, mtime=0), TYPES[path.suffix], tag)
    return found


@page.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """Send the page."""
    return _sent(INDEX, request)


@page.get("/v1/page")
async def settings(request: Request) -> dict[str, Any]:
    """Return what the page must know of this server. Needs the API key."""
    serving: Serving = request.app.state.serving
    engine, client = serving.engine, current_client()
    return {
        "version": __version__,
        "model": serving.options.model_names[0],
        "max_model_len": engine.max_model_len,
        "defaults": dict(engine.sampling_defaults.values),
        "max_new_tokens": engine.sampling_defaults.max_new_tokens,
        "chat": engine.chat_template is not None,
        "thinks": serving.thoughts is not None or serving.channels,
        "operator": client.operator,
        "replicas": len(getattr(engine, "engines", (engine,))),
    }


@page.api_route("/page/{name}", methods=["GET", "HEAD"])
async def file(request: Request, name: str) -> Response:
    """Send a script, style sheet or picture of the page."""
    return _sent(name, request)


def _sent(name: str, request: Request) -> Response:
    found = read_files().get(name)
    if found is None:
        raise ApiError(404, f"the page has no file {name[:100]!r}: load it again from /", code="not_found")
    headers = HEADERS | {"ETag": found.tag}
    if found.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(found.compressed, headers=headers, media_type=found.media_type)
    return Response(found.plain, headers=headers, media_type=found.media_type)
