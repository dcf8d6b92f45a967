"""The FastAPI application: routes only. What a route does is in the module that it calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel

from .. import __version__
from ..search.methods.registry import search_prefixes
from .anthropic.messages import Messages, count_tokens
from .anthropic.messages import error_event as message_error
from .anthropic.protocol import CountRequest, MessagesRequest
from .capture.routes import capture_routes
from .generation import Prompt
from .http import errors
from .http.body import JsonRoute, aside
from .http.errors import ApiError, ErrorBody
from .http.gate import SHOWN, Gate
from .http.lifetime import GONE, ClientGone, Deadline, unless_disconnected
from .http.sse import EventStream, Raw
from .openai.chat import Chat, chat_opens_a_turn
from .openai.completions import Completion
from .openai.long_replies import json_of
from .openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .openai.replies import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    Health,
    Model,
    ModelList,
    TokenizeResponse,
)
from .openai.responses import Responses, ResponseStore
from .openai.responses import error_event as response_error
from .openai.responses_protocol import ResponsesRequest
from .operations.adapter_routes import adapter_routes
from .operations.bills import bills
from .operations.health import health_of, scrape
from .operations.live import Watches
from .operations.live_routes import live_routes
from .operations.release_routes import release_routes
from .operations.routes import operations
from .operations.what_if import what_if_routes
from .options import ServerOptions
from .page.routes import page
from .prompts import chat_prompt, encode, most_counted, truncated
from .rendering import Renderer
from .retrieval.routes import retrieval
from .sender import note_request, sender_of
from .serving import Engine, Serving

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "the request is not valid; the message names what to change",
        401: "a valid API key is needed",
        403: "for the operator's key",
        404: "no such model",
        413: "the body is too long",
        415: "the body is not JSON",
        429: "this client is at a limit of its own; Retry-After says when to come back",
        500: "this request failed inside the server",
        503: "the queue is full (Retry-After says when to come back), draining, or the engine has stopped",
        504: "the request took too long",
    }.items()
}

api = APIRouter(route_class=JsonRoute, responses=REFUSALS)
plain = APIRouter()


def create_app(engine: Engine, options: ServerOptions, renderer: Renderer | None = None) -> FastAPI:
    """Build the application around a running engine. The caller owns the engine and the renderer.

    Args:
        engine: an ``AsyncEngine``.
        options: names, keys and limits.
        renderer: of chat templates; None renders in this process.
    """
    app = FastAPIOffline(  # /docs with files of its own, for machines without internet
        title="Transect",
        version=__version__,
        description="An OpenAI-compatible API. Extra sampling fields have the names that vLLM gave them.",
        redoc_url=None,
        static_url="/docs/files",
    )
    if options.api_keys or options.admin_api_keys:
        _describe_keys(app)
    serving = Serving(engine, options, renderer)
    app.state.serving = serving
    app.state.responses = ResponseStore()
    app.state.watches = Watches(engine)
    errors.install(app)
    app.include_router(api)
    app.include_router(plain)
    app.include_router(operations)
    app.include_router(retrieval, responses=REFUSALS)
    app.include_router(bills)
    for router in (live_routes, what_if_routes, adapter_routes, capture_routes, release_routes):
        app.include_router(router, responses=REFUSALS)
    for each in getattr(engine, "routes", ()):  # of a fleet
        app.include_router(each, responses=REFUSALS)
    if options.page:
        app.include_router(page)
    app.add_middleware(Gate, serving=serving)
    if options.allowed_origins:
        # Outside the gate: a browser asks first whether it may send the key, and does so without the key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After", "Server-Timing", *(name.decode() for _, name in SHOWN)),
        )
    return app


def _describe_keys(app: FastAPI) -> None:
    """Declare keys as bearer tokens in the API's description, so that /docs can send one."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        schema = describe()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        return schema

    app.openapi = described  # type: ignore[method-assign]


def _serving(request: Request, body: Any = None) -> Serving:
    """Return the server's state, after the model and the sender of a request with a body were noted."""
    serving: Serving = request.app.state.serving
    if body is not None:
        earlier = getattr(body, "previous_response_id", None)
        beginning = "" if earlier is None else request.app.state.responses.beginning(earlier)
        note_request(sender=sender_of(request.headers, body, beginning))
        serving.check_model(body.model)
    return serving


def _deadline(request: Request) -> Deadline:
    return Deadline(_serving(request).options.request_timeout_s, request.state.arrival)


async def _answer(
    request: Request, make: Callable[[Deadline], Chat | Completion | Messages | Responses], **stream: Any
) -> Response:
    """Answer with a stream or one body; stop if the client disconnects.

    Args:
        make: the work; checks the whole body, in a thread where that is large.
        stream: arguments of ``EventStream``.
    """
    turns = _serving(request).turns
    work = await aside(make, _deadline(request))
    try:
        if work.body.stream:
            return EventStream(await unless_disconnected(request.receive, work.begin(), turns), turns=turns, **stream)
        reply: BaseModel | Raw = await unless_disconnected(request.receive, work.whole(), turns)
    except ClientGone:
        return GONE
    return Response(await json_of(reply), media_type="application/json")


@api.post("/v1/completions", response_model=CompletionResponse, tags=["OpenAI"])
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one prompt or several."""
    return await _answer(request, functools.partial(Completion, _serving(request, body), body))


@api.post("/v1/chat/completions", response_model=ChatResponse, tags=["OpenAI"])
async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
    """Return the next message of a conversation."""
    return await _answer(request, functools.partial(Chat, _serving(request, body), body))


@api.post("/v1/responses", tags=["OpenAI"])
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation, and keep the answer for the next request (``previous_response_id``)."""
    make = functools.partial(Responses, _serving(request, body), request.app.state.responses, body)
    return await _answer(request, make, done=b"", failed=response_error)


@api.get("/v1/responses/{response_id}", tags=["OpenAI"])
async def response_by_id(request: Request, response_id: str) -> Response:
    """Return a kept answer."""
    return Response(request.app.state.responses.find(response_id)[0], media_type="application/json")


@api.delete("/v1/responses/{response_id}", tags=["OpenAI"])
async def forget_response(request: Request, response_id: str) -> dict[str, Any]:
    """Delete a kept answer."""
    request.app.state.responses.forget(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@api.post("/v1/messages", tags=["Anthropic"])
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Return the next message of a conversation, in the form of Anthropic's API."""
    make = functools.partial(Messages, _serving(request, body), body)
    return await _answer(request, make, done=b"", failed=message_error)


@api.post("/v1/messages/count_tokens", tags=["Anthropic"])
async def count_message_tokens(request: Request, body: CountRequest) -> dict[str, int]:
    """Count the tokens of a prompt."""
    async with _deadline(request):
        return {"input_tokens": await count_tokens(_serving(request, body), body)}


@api.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
async def models(request: Request) -> ModelList:
    """List the names that requests may give as ``model``."""
    serving = _serving(request)
    names = serving.version_names()
    if serving.options.search_models:
        names += [f"{prefix}-{name}" for name in names for prefix in search_prefixes()]
    names += serving.releases.names()
    return ModelList(data=[_model(serving, name) for name in names])


@api.get("/v1/models/{name:path}", response_model=Model, tags=["OpenAI"])
async def model(request: Request, name: str) -> Model:
    """Describe one served model or released name."""
    serving = _serving(request)
    if name not in serving.releases.names():
        serving.check_model(name)
    return _model(serving, name)


def _model(serving: Serving, name: str) -> Model:
    limit, names = serving.engine.max_model_len, serving.options.model_names
    entry = None if name in names else serving.adapters.find(name)
    if entry is None:
        return Model(id=name, created=serving.started, root=name, max_model_len=limit)
    return Model(id=name, created=entry.created, root=str(entry.path), parent=names[0], max_model_len=limit)


@api.post("/tokenize", response_model=TokenizeResponse, tags=["tokenizer"])
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeResponse:
    """Return the token ids of a text, or of messages as the model would see them."""
    serving = _serving(request, body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    async with _deadline(request):
        if body.messages is not None:
            prompt = await chat_prompt(
                serving,
                body.messages,
                add_generation_prompt=chat_opens_a_turn(body),
                continue_final_message=bool(body.continue_final_message),
                add_special=body.add_special_tokens is True,
                truncate=body.truncate_prompt_tokens,
                template_kwargs=body.chat_template_kwargs,
            )
            tokens = prompt.token_ids
        else:
            add, parse = body.add_special_tokens is not False, body.parse_special is not False
            most = most_counted(serving)
            tokens = await encode(serving, body.prompt or "", add_special=add, parse_special=parse, limit=most)
            tokens = truncated(serving, Prompt(body.prompt, tokens), body.truncate_prompt_tokens, 0).token_ids
    texts = [serving.engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    limit = serving.engine.max_model_len
    return TokenizeResponse(count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=texts)


@api.post("/detokenize", response_model=DetokenizeResponse, tags=["tokenizer"])
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    """Return the text of token ids."""
    serving = _serving(request, body)
    limit = serving.engine.vocab_size
    if body.tokens and max(body.tokens) >= limit:
        message = f"tokens holds id {max(body.tokens)}; this model has ids 0 to {limit - 1}"
        raise ApiError(400, message, param="tokens", code="invalid_token_id")
    skip = body.skip_special_tokens is True
    text = await asyncio.to_thread(serving.engine.tokenizer.decode, body.tokens, skip_special_tokens=skip)
    return DetokenizeResponse(prompt=text)


@plain.get("/health", response_model=Health, responses={503: {"model": Health}}, tags=["operations"])
async def health(request: Request) -> JSONResponse:
    """Return 200 while the server takes work and its engine makes progress, else 503 with the reason. Needs no API
    key."""
    report = await health_of(_serving(request))
    return JSONResponse(report.model_dump(), status_code=200 if report.state == "ok" else 503)


@plain.get("/metrics", response_class=Response, tags=["operations"])
async def metrics(request: Request) -> Response:
    """Return the Prometheus metrics. Needs no API key, unless the server was started with --protect-metrics."""
    return Response(await scrape(_serving(request)), media_type="text/plain; version=0.0.4; charset=utf-8")
