"""Send the page's files: to everybody, since they hold no user data. What the page asks for needs the API key."""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from fastapi import APIRouter, Request, Response

from ... import __version__
from ...search.judges import BUILTIN
from ...search.methods.registry import search_methods
from ...spec.settings import Setting, settings_of
from ..http.clients import check_operator, current_client
from ..http.errors import ApiError
from ..serving import Serving
from .flows import flow_reports

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
        "searches": _searches(serving),
        "flows": len(serving.options.flow_dirs) if client.operator else 0,
        "replicas": len(getattr(engine, "engines", (engine,))),
    }


@page.get("/v1/flows")
async def flows(request: Request) -> list[dict[str, Any]]:
    """Return the states of the flows that this server was told of, as reports. For the operator's key."""
    check_operator()
    serving: Serving = request.app.state.serving
    return await asyncio.to_thread(flow_reports, [Path(each) for each in serving.options.flow_dirs])


def _searches(serving: Serving) -> list[dict[str, Any]]:
    """Describe the methods of search, and the settings of each."""
    judges = [*BUILTIN, *serving.search.judges(serving.adapters.entries())]
    found = []
    for method in search_methods().values():
        kind: Any = method.options
        settings = [_described(each, judges) for each in settings_of(kind)]
        found.append({"name": method.name, "about": method.about, "settings": settings})
    return found


def _described(setting: Setting, judges: list[str]) -> dict[str, Any]:
    """Describe a setting as a field of a form; ``score`` names a judge."""
    choices = list(judges) if setting.name == "score" else list(setting.choices)
    number = int in setting.kinds or float in setting.kinds
    return {
        "name": setting.name,
        "help": setting.help,
        "default": setting.default,
        "kind": "choice" if choices else "flag" if bool in setting.kinds else "number" if number else "text",
        "whole": float not in setting.kinds,
        "list": any(get_origin(kind) is tuple for kind in setting.kinds),
        "least": setting.about.least,
        "most": setting.about.most,
        "choices": choices,
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
