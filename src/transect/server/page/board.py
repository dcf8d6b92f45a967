"""The page over reports and training runs: the same files as ``transect serve`` sends, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from ..http import errors
from .routes import HEADERS, INDEX, page, read_files

MARK = b'<meta name="transect-board" content="1">'
"""Element by which the page knows that there is no model behind it."""


def create_board(read: Callable[[], list[dict[str, Any]]]) -> FastAPI:
    """Build the application. ``read``: returns the reports, each with ``name`` and ``content``; called in a thread for
    each look at the page, so that running runs are shown as they grow."""
    app = FastAPI(openapi_url=None)
    errors.install(app)

    @app.get("/")
    async def index() -> Response:
        text = read_files()[INDEX].plain.replace(b"<title>", MARK + b"<title>", 1)
        return Response(text, headers=HEADERS, media_type=read_files()[INDEX].media_type)

    @app.get("/board.json")
    async def board() -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(read))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"state": "ok"}

    app.include_router(page)
    return app
