"""``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``: many short engine requests without sampled text.

They run in groups, so that the texts of one HTTP request do not fill the queue for everybody else.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from ...engine.executors import pooling
from ...engine.frontends import scoring
from ...engine.scheduling.sampling_params import SamplingParams
from ..capture.slips import RequestContent
from ..generation import Prompt, whole_in_groups
from ..http.body import JsonRoute
from ..http.errors import ApiError, bad_value
from ..http.lifetime import GONE, ClientGone, Deadline, unless_disconnected
from ..openai.protocol import FIELDS
from ..operations import request_log
from ..prompts import check_length, completion_prompts, encode
from ..sender import note_request, sender_of
from ..serving import Serving
from ..watching import RequestWatch
from .protocol import (
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingResponse,
    RankedDocument,
    RerankRequest,
    RerankResponse,
    ScoreObject,
    ScoreRequest,
    ScoreResponse,
    TextUsage,
)

if TYPE_CHECKING:
    from ...text.outputs import RequestOutput

MAX_INPUTS = 2048
"""Most texts or pairs in one request, as in OpenAI's API."""
NO_DATA = b'"data":[]'
"""Placeholder in a reply's JSON, before any text of a client."""

retrieval = APIRouter(route_class=JsonRoute, tags=["retrieval"])


class _Work:
    """The engine requests of one HTTP request."""

    def __init__(self, request: Request, body: EmbeddingRequest | ScoreRequest | RerankRequest) -> None:
        self.serving: Serving = request.app.state.serving
        note_request(sender=sender_of(request.headers, body))
        self.serving.check_model(body.model)
        self.deadline = Deadline(self.serving.options.request_timeout_s, request.state.arrival)
        self.priority = body.priority or 0
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.tokens = 0

    async def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        pool: pooling.Pooling | None = None,
        content: RequestContent | None = None,
    ) -> list[RequestOutput]:
        """Run the prompts, and return their results in order. ``content``: of the request, for captures."""
        watch = RequestWatch(self.serving, self.id, len(prompts))
        note_request(version=None)  # groups of prompts are parts
        if content is not None:
            watch.describe(content)
        with watch:
            results = await whole_in_groups(self.serving, prompts, params, self.priority, self.deadline, pool)
            for place, result in enumerate(results):
                watch.answered(place, result)
        self.tokens = sum(len(prompt.token_ids) for prompt in prompts)
        request_log.note(prompt_tokens=self.tokens, completion_tokens=0)
        return results

    def usage(self) -> TextUsage:
        return TextUsage(prompt_tokens=self.tokens, total_tokens=self.tokens)

    async def scores(self, pairs: Iterable[tuple[str, str]], query: str, document: str) -> list[float]:
        """Score (query, document) pairs; ``query`` and ``document`` name the fields that they come from."""
        prompts, lengths = [], []
        async with self.deadline:
            for asked, text in pairs:
                if not asked.strip():
                    raise ApiError(400, f"{query} is empty: give at least one word", param=query, code="empty_prompt")
                before = await encode(
                    self.serving, scoring.document_text(text), add_special=True, parse_special=False, field=document
                )
                after = await encode(self.serving, scoring.query_text(asked), add_special=False, field=query)
                await asyncio.sleep(0)  # many short texts are as much work as a long one
                check_length(self.serving, before + after, document)
                prompts.append(Prompt(None, before + after, prompt_logprobs_start=len(before)))
                lengths.append(len(after))
        results = await self.run(prompts, scoring.PARAMS)
        return [scoring.score(result, length) for result, length in zip(results, lengths, strict=True)]


@retrieval.post("/v1/embeddings", response_model=EmbeddingResponse)
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Compute a vector for each text."""
    work = _Work(request, body)
    try:
        return await unless_disconnected(request.receive, _embeddings(work, body), work.serving.turns)
    except ClientGone:
        return GONE


async def _embeddings(work: _Work, body: EmbeddingRequest) -> Response:
    serving = work.serving
    try:
        params = pooling.PoolingParams(
            pooling=body.pooling or serving.engine.default_pooling,
            normalize=body.normalize is not False,
            dimensions=body.dimensions,
        )
        params.check_size(serving.engine.hidden_size)
    except ValueError as error:
        raise bad_value(str(error), FIELDS | EmbeddingRequest.model_fields.keys()) from None
    async with work.deadline:
        prompts = await completion_prompts(
            serving,
            body.input,
            add_special=body.add_special_tokens is not False,
            parse_special=body.parse_special is True,
            truncate=body.truncate_prompt_tokens,
            field="input",
            most=MAX_INPUTS,
        )
    content = RequestContent("embeddings", pooling.PARAMS, None, prompts)
    results = await work.run(prompts, pooling.PARAMS, params.pooling, content)
    pieces = []
    for index, result in enumerate(results):
        assert result.pooled is not None, "a request that fails has raised by now"
        vector = pooling.embedding(result.pooled, params)
        shown = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        pieces.append(EmbeddingObject(index=index, embedding=shown).model_dump_json().encode())
        await asyncio.sleep(0)  # thousands of long vectors would stall other requests
    around = EmbeddingResponse(data=[], model=serving.model_name, usage=work.usage()).model_dump_json().encode()
    body_bytes = around.replace(NO_DATA, NO_DATA[:-1] + b",".join(pieces) + b"]", 1)
    return Response(body_bytes, media_type="application/json")


@retrieval.post("/v1/score", response_model=ScoreResponse)
@retrieval.post("/score", response_model=ScoreResponse, include_in_schema=False)
async def score(request: Request, body: ScoreRequest) -> ScoreResponse | Response:
    """Score how likely each query is after its document, between 0 and 1."""
    work = _Work(request, body)
    try:
        pairs = scoring.pairs(body.text_1, body.text_2)
    except ValueError as error:
        raise ApiError(400, str(error), param="text_1", code="invalid_value") from None
    _check_count(len(pairs), "text_2")
    try:
        scores = await unless_disconnected(request.receive, work.scores(pairs, "text_1", "text_2"), work.serving.turns)
    except ClientGone:
        return GONE
    data = [ScoreObject(index=index, score=each) for index, each in enumerate(scores)]
    name = work.serving.model_name
    return ScoreResponse(id=f"score-{work.id}", created=work.created, model=name, data=data, usage=work.usage())


@retrieval.post("/v1/rerank", response_model=RerankResponse)
@retrieval.post("/v2/rerank", response_model=RerankResponse, include_in_schema=False)
@retrieval.post("/rerank", response_model=RerankResponse, include_in_schema=False)
async def rerank(request: Request, body: RerankRequest) -> RerankResponse | Response:
    """Sort documents by their relevance to a query; scores as of ``/v1/score``."""
    work = _Work(request, body)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    _check_count(len(texts), "documents")
    if body.top_n is not None and body.top_n < 1:
        raise ApiError(400, f"top_n must be at least 1, got {body.top_n}", param="top_n", code="invalid_value")
    pairs = [(body.query, text) for text in texts]
    try:
        scores = await unless_disconnected(
            request.receive, work.scores(pairs, "query", "documents"), work.serving.turns
        )
    except ClientGone:
        return GONE
    shown = body.return_documents is not False
    ranked = [
        RankedDocument(index=index, document={"text": texts[index]} if shown else None, relevance_score=scores[index])
        for index in sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n]
    ]
    return RerankResponse(id=f"rerank-{work.id}", model=work.serving.model_name, results=ranked, usage=work.usage())


def _check_count(count: int, field: str) -> None:
    if not 0 < count <= MAX_INPUTS:
        raise ApiError(400, f"{field} holds {count} texts: give 1 to {MAX_INPUTS}", param=field, code="invalid_value")
