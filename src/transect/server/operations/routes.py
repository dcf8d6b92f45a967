"""Routes for operators: version, liveness, load, and the prefix cache."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ... import __version__
from ..http.clients import check_operator
from ..http.errors import ApiError
from ..openai.replies import Load, TokenizerInfo, Version
from ..serving import Serving
from .health import health_of

operations = APIRouter(tags=["operations"], responses={503: {"description": "draining, or the engine has stopped"}})


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


@operations.get("/version", response_model=Version)
async def version() -> Version:
    """Return the version of the server."""
    return Version(version=__version__)


@operations.get("/ping", response_class=Response)
@operations.post("/ping", response_class=Response)
async def ping(request: Request) -> Response:
    """Return an empty 200 while the server takes work, else 503, for the probes of hosting services. No API key."""
    report = await health_of(_serving(request))
    return Response(status_code=200 if report.state == "ok" else 503)


@operations.get("/load", response_model=Load)
async def load(request: Request) -> Load:
    """Return the number of requests in flight."""
    watching = request.app.state.watches.readers
    return Load(server_load=_serving(request).in_flight - watching - 1)  # without this one


@operations.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """Return the facts a client needs to encode text as the server does."""
    engine = _serving(request).engine
    tokenizer, template = engine.tokenizer, engine.chat_template
    bos, ends = tokenizer.bos_token_id, list(tokenizer.eos_token_ids)
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=tokenizer.vocab_size,
        model_max_length=engine.max_model_len,
        bos_token=None if bos is None else tokenizer.token_text(bos),
        bos_token_id=bos,
        eos_token=tokenizer.token_text(ends[0]) if ends else None,
        eos_token_ids=ends,
        special_tokens=list(tokenizer.special_texts),
        chat_template=None if template is None else template.source,
    )


@operations.post("/reset_prefix_cache", responses={403: {"description": "for the operator's key"}})
async def reset_prefix_cache(request: Request) -> JSONResponse:
    """Empty the prefix cache. Running requests keep their KV. Needs the operator's key."""
    check_operator()
    try:
        await _serving(request).engine.reset_prefix_cache()
    except RuntimeError as error:
        raise ApiError(503, f"the engine has stopped: {error}", code="engine_dead") from None
    return JSONResponse({"status": "ok"})
