"""Crowds and large bodies leave the event loop to others in between."""

import asyncio
import json
import threading

import httpx
import pytest

from transect.server.app import create_app
from transect.server.http import body as bodies
from transect.server.http.turns import ArrivalGate
from transect.server.openai.protocol import ChatCompletionRequest
from transect.server.serving import ServerOptions

JSON = {"content-type": "application/json"}


async def test_a_crowd_passes_a_few_at_a_time():
    turns, passed, seen = ArrivalGate(3), [], []

    async def each(number):
        await turns.wait()
        passed.append(number)

    crowd = [asyncio.ensure_future(each(number)) for number in range(20)]
    while len(passed) < 20:
        await asyncio.sleep(0)
        seen.append(len(passed))
    await asyncio.gather(*crowd)
    assert passed == sorted(passed)
    assert all(after - before <= 3 for before, after in zip([0, *seen], seen, strict=False))


async def test_whoever_leaves_the_crowd_holds_up_nobody():
    turns, passed = ArrivalGate(1), []

    async def each(number):
        await turns.wait()
        passed.append(number)

    crowd = [asyncio.ensure_future(each(number)) for number in range(6)]
    await asyncio.sleep(0)
    for task in crowd[2:5]:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert passed == [0, 1, 5]


async def test_requests_and_leavers_wait_for_their_turns(client, app, engine):
    waits = []
    turns = app.state.serving.turns

    async def wait(original=turns.wait):
        waits.append(asyncio.current_task())
        await original()

    turns.wait = wait
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert len(waits) == 1
    assert (await client.get("/health")).status_code == 200 and len(waits) == 1, "probes wait for nobody"


@pytest.fixture
def threads(monkeypatch):
    """Threads that parsed a body, and that made the work."""
    seen = {}

    def watch(owner, name, label):
        original = getattr(owner, name)

        def call(*arguments, **options):
            seen[label] = threading.get_ident()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    watch(bodies, "_parsed", "parse")
    watch(ChatCompletionRequest, "sampling_params", "params")
    return seen


@pytest.mark.parametrize("count", [10, 3000])
async def test_large_bodies_are_checked_in_threads(engine, threads, count):
    app = create_app(engine, ServerOptions(model_names=("fake-model",)))
    engine.max_model_len = 10**6
    messages = [{"role": "user", "content": "hello"}] * count
    body = json.dumps({"messages": messages, "max_tokens": 1}).encode()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        response = await client.post("/v1/chat/completions", content=body, headers=JSON)
        assert response.status_code == 200, response.text
        wrong = body.replace(b'"user"', b'"nobody"', 1)
        refused = await client.post("/v1/chat/completions", content=wrong, headers=JSON)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    here = threading.get_ident()
    aside = len(body) > bodies.LARGE
    assert aside == (count > 1000)
    assert (threads["parse"] != here) == aside and (threads["params"] != here) == aside


@pytest.mark.parametrize(
    ("field", "value"),
    [("bad_words", "word"), ("stop", "word"), ("logit_bias", None)],
)
async def test_half_a_million_texts_are_refused_by_count(engine, monkeypatch, field, value):
    monkeypatch.setattr("pydantic_core.from_json", lambda *a, **k: pytest.fail("it was parsed"))
    app = create_app(engine, ServerOptions(model_names=("fake-model",)))
    values = {str(n): 1 for n in range(500_000)} if value is None else [f"{value}{n}" for n in range(500_000)]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        response = await client.post("/v1/completions", json={"prompt": "a", field: values})
    assert response.status_code == 413
    assert "131072 strings" in response.json()["error"]["message"]
