"""Embeddings, scores and ranks over HTTP, on the fake engine."""

import asyncio
import base64
import contextlib
import math
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from transect.engine.frontends.scoring import document_text
from transect.engine.scheduling.policies.admission import QueueFull
from transect.server.app import create_app
from transect.server.options import ServerOptions
from transect.server.retrieval import routes as retrieval

MODEL = "fake-model"


async def refused(client, path, body, words):
    answer = await client.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    return answer.json()["error"]


async def vectors(client, **body):
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert [each["index"] for each in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return [each["embedding"] for each in answer.json()["data"]], answer.json()


def unit(*numbers):
    return [pytest.approx(each / math.hypot(*numbers), abs=1e-6) for each in numbers]


async def test_forms_of_input_and_of_vectors(client, engine):
    found, answer = await vectors(client, input=["Hi", "abc"], model=MODEL)
    assert found == [unit(2, 105, 3, 1), unit(3, 99, 3, 1)]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5} and answer["model"] == MODEL
    assert {params.max_tokens for _, params, _ in engine.seen} == {1}
    assert (await vectors(client, input=[72, 105]))[0] == (await vectors(client, input=[[72, 105]]))[0] == found[:1]
    (short,), _ = await vectors(client, input="Hi", dimensions=2)
    assert short == unit(2, 105)
    (free,), _ = await vectors(client, input="Hi", normalize=False, pooling="mean")
    assert free == [2, 105, 3, -1]
    (packed,), _ = await vectors(client, input="Hi", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(packed), np.float32).tolist() == unit(2, 105, 3, 1)
    (cut,), answer = await vectors(client, input="x" * 300, truncate_prompt_tokens=5, normalize=False)
    assert cut[0] == 5 and answer["usage"]["prompt_tokens"] == 5


async def test_many_texts_run_in_groups(client, engine):
    most = 0

    async def watch():
        nonlocal most
        while True:
            most = max(most, len(engine.running))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    found, _ = await vectors(client, input=["x" * (1 + i % 7) for i in range(300)], normalize=False)
    watching.cancel()
    assert [vector[0] for vector in found] == [1 + i % 7 for i in range(300)]
    assert 1 < most <= 64


async def test_one_request_does_not_fill_the_queue_by_itself(engine, monkeypatch):
    """Neither with texts nor with beams."""
    stream = engine.stream

    async def bounded(prompt_token_ids, params, request_id, **options):
        if len(engine.running) >= 4:
            raise QueueFull(4, 1.0)
        async for update in stream(prompt_token_ids, params, request_id, **options):
            yield update

    monkeypatch.setattr(engine, "stream", bounded)
    app = create_app(engine, ServerOptions(model_names=("fake-model",), max_prompts=4))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        assert len((await vectors(client, input=["x"] * 9))[0]) == 9
        body = {"prompt": ["a", "b", "c"], "use_beam_search": True, "n": 2, "max_tokens": 3}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 6


@pytest.mark.parametrize(
    ("changes", "words", "param"),
    [
        ({"dimensions": 5}, "dimensions must be at most 4, the size of this model", "dimensions"),
        ({"dimensions": 0}, "dimensions must be at least 1", "dimensions"),
        ({"input": ""}, "input is empty", "input"),
        ({"input": []}, "input is empty", "input"),
        ({"input": "x" * 300}, "This model's maximum context length is 200 tokens. However, your input", "input"),
        ({"input": [999]}, "input holds token id 999", "input"),
        ({"input": ["a"] * 2049}, "input holds 2049 prompts; send at most 2048", "input"),
        ({"pooling": "max"}, "pooling", "pooling"),
        ({"encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ({"dimension": 2}, "unknown field 'dimension'; did you mean 'dimensions'", "dimension"),
    ],
)
async def test_what_cannot_be_embedded(client, changes, words, param):
    assert (await refused(client, "/v1/embeddings", {"input": "Hi", **changes}, words))["param"] == param
    full = await client.post("/v1/embeddings", json={"input": ["Hi", "FULL"]})
    assert full.status_code == 503 and "Retry-After" in full.headers


async def test_scores_and_ranks(client, engine):
    """The fake gives every token of a prompt the log-probability -0.5."""
    for path in ("/v1/score", "/score"):
        answer = (await client.post(path, json={"text_1": "why", "text_2": ["a", "bb"]})).json()
        assert [each["score"] for each in answer["data"]] == [pytest.approx(math.exp(-0.5))] * 2
        assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] > 0
    (_, params, _) = engine.seen[-1]
    assert params.prompt_logprobs == 0
    before = [engine.tokenizer.encode(document_text(text), add_special_tokens=True) for text in ("a", "bb")]
    assert [params.prompt_logprobs_start for _, params, _ in engine.seen] == 2 * [len(each) for each in before]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        body = {"query": "why", "documents": ["a", {"text": "b"}, "c"], "top_n": 2}
        results = (await client.post(path, json=body)).json()["results"]
        assert [each["index"] for each in results] == [0, 1] and results[1]["document"] == {"text": "b"}
    bare = (await client.post("/rerank", json={**body, "return_documents": False})).json()["results"]
    assert [each["document"] for each in bare] == [None, None]


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 texts", "text_1"),
        ("/v1/score", {"text_1": " ", "text_2": "c"}, "text_1 is empty", "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_1 has", "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents holds 0 texts", "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["x"], "top_n": 0}, "top_n must be at least 1", "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["x" * 300]}, "your documents resulted in", "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": 1}]}, "must be a list of strings", "documents"),
    ],
)
async def test_what_cannot_be_scored(client, path, body, words, param):
    assert (await refused(client, path, body, words))["param"] == param


async def test_openai_asks_for_embeddings(live):
    import openai

    client = openai.AsyncOpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)
    answer = await client.embeddings.create(model=MODEL, input=["Hi", "abc"], dimensions=2)
    assert [each.embedding for each in answer.data] == [unit(2, 105), unit(3, 99)]
    await client.close()


async def test_many_documents_hold_up_nobody(monkeypatch):
    """Others have their turn after each of the documents, however short these are."""
    turns, seen = 0, []

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def encode(serving, text, **_):
        seen.append(turns)
        return [1]

    async def run(prompts, params):
        return [None] * len(prompts)

    monkeypatch.setattr(retrieval, "encode", encode)
    monkeypatch.setattr(retrieval, "check_length", lambda *_: None)
    monkeypatch.setattr(retrieval.scoring, "score", lambda result, length: 0.5)
    work = SimpleNamespace(deadline=contextlib.nullcontext(), serving=None, run=run)
    task = asyncio.create_task(others())
    pairs = [("query", f"document {i}") for i in range(5)]
    assert await retrieval._Work.scores(work, pairs, "query", "documents") == [0.5] * 5
    task.cancel()
    assert seen[::2] == list(range(5))
