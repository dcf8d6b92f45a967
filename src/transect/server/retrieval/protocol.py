"""Bodies and answers of the routes for retrieval: embeddings as OpenAI has them, scores and ranks as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel

from ..http.bounds import Listed
from ..openai.protocol import Body, Prompt, SenderBody, Whole, shape

Texts = Annotated[str | Listed[str], shape("a string or a list of strings")]


class EmbeddingRequest(SenderBody):
    """``POST /v1/embeddings``: a vector for each text."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None
    # beyond OpenAI's
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    priority: Whole | None = None


class ScoreRequest(Body):
    """``POST /v1/score``: how well each of ``text_2`` fits ``text_1``: one query for all, or one for each."""

    model: str | None = None
    text_1: Texts
    text_2: Texts
    priority: Whole | None = None


class Document(Body):
    """A text in an object."""

    text: str


class RerankRequest(Body):
    """``POST /v1/rerank``: documents sorted by their relevance to a query."""

    model: str | None = None
    query: str
    documents: Annotated[Listed[str | Document], shape('a list of strings, or of {"text": ...}')]
    top_n: Whole | None = None
    return_documents: bool | None = None
    priority: Whole | None = None


class TextUsage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(BaseModel):
    """One vector: numbers, or float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """Vectors in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: TextUsage


class ScoreObject(BaseModel):
    """The score of one pair, between 0 and 1."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(BaseModel):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreObject]
    usage: TextUsage


class RankedDocument(BaseModel):
    """A document with its index in the request."""

    index: int
    document: dict[str, Any] | None = None
    relevance_score: float


class RerankResponse(BaseModel):
    """The best documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: TextUsage
