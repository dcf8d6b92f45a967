"""Models that look at captured texts: vectors of texts, and a judge of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from .drift import Embed, Judge
from .records import Observation

MOST_CHARACTERS = 2000
"""Characters of a text that are looked at."""
MOST_TOKENS = 384
GROUP = 64
"""Texts of one request."""
ASIDE = {"X-Transect-Capture": "no"}
"""Header of requests that are no user's, so that a server does not capture them."""
JUDGE = (
    "You grade answers of an assistant. Read the question and the answer, then reply with one digit from 1 (wrong or "
    "useless) to 5 (correct, complete and clear) and nothing else.\n\n"
    "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nGrade:"
)
GRADES = "12345"


class RefusedText(ValueError):
    """A server refuses a text, for example because it is too long."""


def embed_here(model: str, threads: int | None = None) -> Embed:
    """Load a model in this process, and return its vectors: hidden states after the final norm, mean over the tokens.

    Raises:
        ValueError: the model cannot be loaded.
    """
    from ...engine.executors.pooling import PoolingParams
    from ...engine.frontends.llm import LLM

    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    llm = LLM(model, max_model_len=MOST_TOKENS + 8, **options)
    params = PoolingParams(pooling="mean", truncate_prompt_tokens=MOST_TOKENS)

    def vectors(texts: Sequence[str]) -> np.ndarray:
        found = llm.embed([_cut(text) for text in texts], params)
        return np.asarray([each.outputs.embedding for each in found], np.float32)

    return remembered(vectors)


def embed_at(address: str, model: str | None = None, key: str | None = None) -> Embed:
    """Return the vectors of a server's ``/v1/embeddings``.

    Args:
        address: such as ``http://127.0.0.1:8000``.
        model: name in requests; None for the server's own.
        key: API key; None for none.
    """
    client = _client(address, key)

    def vectors(texts: Sequence[str]) -> np.ndarray:
        found: list[list[float]] = []
        for start in range(0, len(texts), GROUP):
            body = {"input": [_cut(text) for text in texts[start : start + GROUP]], "model": model}
            data = _answer(client, "/v1/embeddings", body)["data"]
            found += [each["embedding"] for each in sorted(data, key=lambda each: each["index"])]
        return np.asarray(found, np.float32)

    return remembered(vectors)


def remembered(vectors: Embed, most: int = 8192) -> Embed:
    """Return a function that computes the vector of a text that comes again only once."""
    known: dict[str, np.ndarray] = {}

    def looked_up(texts: Sequence[str]) -> np.ndarray:
        missing = list(dict.fromkeys(text for text in texts if text not in known))
        if len(known) + len(missing) > most:
            known.clear()
            missing = list(dict.fromkeys(texts))
        if missing:
            known.update(zip(missing, vectors(missing), strict=True))
        return np.stack([known[text] for text in texts])

    return looked_up


def judge_at(address: str, model: str | None = None, key: str | None = None, prompt: str = JUDGE) -> Judge:
    """Return a judge that asks a server's ``/v1/chat/completions`` for a grade from 1 to 5, scaled to 0 to 1.

    Args:
        prompt: question to the judge, with ``{prompt}`` and ``{answer}``.

    Raises:
        ValueError: ``prompt`` has no such places.
    """
    if "{prompt}" not in prompt or "{answer}" not in prompt:
        raise ValueError("the judge's prompt must hold {prompt} and {answer}")
    client = _client(address, key)

    def grade(each: Observation) -> float | None:
        asked = prompt.replace("{prompt}", _cut(each.prompt)).replace("{answer}", _cut(each.answer))
        body = {"model": model, "messages": [{"role": "user", "content": asked}], "max_tokens": 8, "temperature": 0}
        try:
            said = _answer(client, "/v1/chat/completions", body)["choices"][0]["message"]["content"] or ""
        except RefusedText:
            return None
        found = re.search(f"[{GRADES}]", said)
        return None if found is None else GRADES.index(found[0]) / (len(GRADES) - 1)

    return lambda observations: [grade(each) for each in observations]


def _cut(text: str) -> str:
    return text[:MOST_CHARACTERS] or " "


def _client(address: str, key: str | None) -> httpx.Client:
    headers = ASIDE | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return httpx.Client(base_url=address.rstrip("/").removesuffix("/v1"), headers=headers, timeout=120.0)


def _answer(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """Post a body, and return the answer. Raises ValueError if the server does not answer, RefusedText for a 400."""
    try:
        reply = client.post(path, json={name: value for name, value in body.items() if value is not None})
    except httpx.HTTPError as error:
        raise ValueError(
            f"{client.base_url}{path} does not answer ({error}): start the server, or correct its address"
        ) from None
    if reply.is_error:
        try:
            message = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = reply.text[:200]
        refusal = RefusedText if reply.status_code == 400 else ValueError
        raise refusal(f"{client.base_url}{path} refuses ({reply.status_code}): {message}")
    try:
        return reply.json()
    except json.JSONDecodeError:
        raise ValueError(f"{client.base_url}{path} answers with no JSON: correct the address") from None
