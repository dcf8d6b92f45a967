"""Limits of clients by key, their use in /metrics, and what the engine hears of clients."""

import asyncio

import httpx
import pytest
from prometheus_client import CollectorRegistry

from transect.server.app import create_app
from transect.server.http.accounts import Accounts, Bucket
from transect.server.http.clients import ApiKey, Client
from transect.server.http.errors import ApiError
from transect.server.serving import ServerOptions

PROMPT = {"prompt": "Hi", "max_tokens": 4}


def test_a_bucket_fills_evenly_and_may_be_overdrawn():
    bucket = Bucket(60, 0.0)
    assert bucket.wait(0.0) == 0.0
    bucket.take(90)
    assert bucket.wait(0.0) == pytest.approx(30, abs=0.01)
    assert bucket.wait(20.0) == pytest.approx(10, abs=0.01)
    assert bucket.wait(31.0) == 0.0
    bucket.take(1)
    assert bucket.wait(1000.0, 60) == 0.0 and bucket.wait(1000.0, 61) > 0
    assert Bucket(None, 0.0).wait(0.0, 1e9) == 0.0


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def accounts(clock):
    return Accounts(CollectorRegistry(), lambda: clock[0])


def refusal(accounts, client):
    with pytest.raises(ApiError) as refused:
        accounts.enter(client)
    assert refused.value.status_code == 429
    return refused.value


def test_requests_a_minute(accounts, clock):
    client = Client("a", requests_per_minute=2)
    for _ in range(2):
        accounts.enter(client)
        accounts.leave(client)
    refused = refusal(accounts, client)
    assert refused.headers["Retry-After"] == "30" and "requests_per_minute (2)" in refused.message
    clock[0] = 30.0
    accounts.enter(client)
    accounts.enter(Client("b", requests_per_minute=2))


def test_tokens_a_minute(accounts, clock):
    client = Client("a", tokens_per_minute=600)
    accounts.enter(client)
    accounts.spend(client, 500, 400)
    refused = refusal(accounts, client)
    assert refused.headers["Retry-After"] == "31" and "tokens_per_minute (600)" in refused.message
    clock[0] = 31.0
    accounts.enter(client)


def test_requests_at_the_same_time(accounts):
    client = Client("a", parallel=1)
    accounts.enter(client)
    assert "parallel (1)" in refusal(accounts, client).message
    accounts.leave(client)
    accounts.enter(client)


def test_clients_without_keys_have_one_account(accounts):
    for number in range(1000):
        client = Client(f"10.0.0.{number}", has_key=False)
        accounts.enter(client)
        accounts.spend(client, 1, 1)
    assert len(accounts._accounts) == 1


async def test_keys_have_limits_shares_and_names(engine):
    team = Client("team", weight=2.5, requests_per_minute=2)
    options = ServerOptions(model_names=("m",), api_keys=("plain", ApiKey("k", team)))
    transport = httpx.ASGITransport(create_app(engine, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
        for key, status in (("k", 200), ("k", 200), ("k", 429), ("plain", 200)):
            reply = await http.post("/v1/completions", json=PROMPT, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == status, reply.text
        assert engine.clients == [("team", 2.5), ("team", 2.5), ("key-1", 1.0)]
        shown = (await http.get("/metrics")).text
    for line in (
        'transect_client_requests_total{client="team",model_name="m"} 2.0',
        'transect_client_refusals_total{client="team",limit="requests_per_minute",model_name="m"} 1.0',
        'transect_client_prompt_tokens_total{client="team",model_name="m"} 4.0',
        'transect_client_generation_tokens_total{client="key-1",model_name="m"} 4.0',
    ):
        assert line in shown.splitlines()


async def test_a_place_is_given_back_by_whoever_leaves(engine):
    client = Client("team", parallel=1)
    app = create_app(engine, ServerOptions(model_names=("m",), api_keys=(ApiKey("k", client),)))
    headers = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        hangs = asyncio.create_task(http.post("/v1/completions", json={"prompt": "HANG"}, headers=headers))
        while not engine.running:
            await asyncio.sleep(0)
        assert (await http.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 429
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        hangs.cancel()
        await asyncio.gather(hangs, return_exceptions=True)
        assert (await http.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 200


async def test_without_keys_the_engine_hears_addresses(client, engine):
    await client.post("/v1/completions", json=PROMPT)
    assert engine.clients == [("127.0.0.1", 1.0)]
    assert 'client="(no key)"' in (await client.get("/metrics")).text
