"""API keys, operators' keys, addresses: who may do and see what."""

import dataclasses
import json
import re
from contextlib import asynccontextmanager

import httpx
import pytest

from transect.server.app import create_app
from transect.server.http.clients import ApiKey, Client, address_of, keys_in
from transect.server.serving import ServerOptions

PROMPT = {"prompt": "Hi", "max_tokens": 2}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def serving(engine, **options):
    app = create_app(engine, ServerOptions(model_names=("m",), **options))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        client.app = app
        yield client


OPERATORS = (("POST", "/reset_prefix_cache"), ("GET", "/v1/decisions"))


@pytest.mark.parametrize(("method", "path"), OPERATORS)
async def test_what_is_for_operators(engine, method, path):
    async with serving(engine, api_keys=("a",), admin_api_keys=("root",)) as client:
        assert (await client.request(method, path)).status_code == 401
        refused = await client.request(method, path, headers=bearer("a"))
        assert refused.status_code == 403 and "--admin-api-key" in refused.json()["error"]["message"]
        assert refused.json()["error"]["type"] == "permission_error"
        assert (await client.request(method, path, headers=bearer("root"))).status_code in (200, 404)
    async with serving(engine, api_keys=("a",)) as client:
        assert (await client.request(method, path, headers=bearer("a"))).status_code == 403
    async with serving(engine, admin_api_keys=("root",)) as client:
        assert (await client.request(method, path)).status_code == 403
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
    async with serving(engine) as client:
        assert (await client.request(method, path)).status_code in (200, 404)


async def test_a_key_sees_its_own_answers_and_the_operator_all(engine):
    async with serving(engine, api_keys=("a", "b"), admin_api_keys=("root",)) as client:
        made = await client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}, headers=bearer("a"))
        path = f"/v1/responses/{made.json()['id']}"
        follow = {"input": "more", "max_output_tokens": 2, "previous_response_id": made.json()["id"]}
        for key, status in (("a", 200), ("b", 404), ("root", 200)):
            assert (await client.get(path, headers=bearer(key))).status_code == status
            assert (await client.post("/v1/responses", json=follow, headers=bearer(key))).status_code == status
        assert (await client.delete(path, headers=bearer("b"))).status_code == 404
        assert (await client.delete(path, headers=bearer("a"))).status_code == 200


async def test_a_key_sees_the_bills_of_its_own_requests(engine):
    async with serving(engine, api_keys=("a", "b"), admin_api_keys=("root",)) as client:
        made = await client.post("/v1/completions", json=PROMPT, headers=bearer("a"))
        path = f"/v1/requests/{made.json()['id']}/bill"
        codes = [(await client.get(path, headers=bearer(key))).json()["error"]["code"] for key in ("a", "b", "root")]
        assert codes == ["no_decisions", "request_not_found", "no_decisions"]


async def test_metrics_are_open_unless_protected(engine):
    async with serving(engine, api_keys=("a",)) as client:
        assert (await client.get("/metrics")).status_code == 200
    async with serving(engine, api_keys=("a",), admin_api_keys=("root",), protect_metrics=True) as client:
        assert (await client.get("/metrics")).status_code == 401
        for key in ("a", "root"):
            assert (await client.get("/metrics", headers=bearer(key))).status_code == 200
        assert (await client.get("/health")).status_code == 200
        client.app.state.serving.draining = True
        assert (await client.get("/metrics", headers=bearer("root"))).status_code == 200
    with pytest.raises(ValueError, match="protect_metrics needs keys"):
        ServerOptions(model_names=("m",), protect_metrics=True)


async def test_a_browser_reads_the_docs_from_this_server_without_a_key(engine):
    async with serving(engine, api_keys=("a",)) as client:
        page = await client.get("/docs")
        assert page.status_code == 200 and "text/html" in page.headers["content-type"]
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(loaded) >= 2 and all(each.startswith("/") for each in loaded), loaded
        assert "//" not in "".join(re.findall(r"https?:(//[^'\"]+)", page.text))
        for each in loaded:
            assert (await client.get(each)).status_code == 200
        described = (await client.get("/openapi.json")).json()
        assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        assert (await client.get("/docs/../v1/models")).status_code in (401, 404)
        assert (await client.get("/v1/models")).status_code == 401
    async with serving(engine, root_path="/llm") as client:
        page = await client.get("/llm/docs")
        assert page.status_code == 200 and "/llm/docs/files/swagger-ui-bundle.js" in page.text


def test_files_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text('plain\n\n{"key": "k2", "name": "team", "weight": 2.5, "parallel": 3, "tokens_per_minute": 100}\n')
    first, second = keys_in(file)
    assert first == ApiKey("plain", Client("key-1"))
    assert second == ApiKey("k2", Client("team", weight=2.5, parallel=3, tokens_per_minute=100))
    assert "plain" not in repr([first]) and "k2" not in repr(second)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ('ok\n{"key": 1}', "line 2: it must have the key"),
        ('{"key": "a"', "line 1: it begins like a JSON object"),
        ('{"key": "a", "wieght": 1}', "there is no field 'wieght'"),
        ('{"key": "a", "operator": true}', "there is no field 'operator'"),
        ('{"key": "a", "weight": 0}', "weight must be a number from 0.01"),
        ('{"key": "a", "weight": true}', "weight must be a number"),
        ('{"key": "a", "parallel": 0}', "parallel must be a whole number"),
        ('{"key": "a", "requests_per_minute": 1.5}', "requests_per_minute must be"),
        ('{"key": "a", "name": "x\\n"}', "name must be a text"),
        ('{"key": "a", "name": "x"}\n{"key": "b", "name": "x", "weight": 2}', "the name 'x' to keys with different"),
    ],
)
def test_files_of_keys_that_are_wrong(tmp_path, text, words):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        keys_in(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("", "local"),
        ("not an address", "local"),
    ],
)
def test_addresses(host, name):
    assert address_of({"client": (host, 1)}) == name
    assert address_of({"client": None}) == "local"


def test_proxies_are_addresses():
    options = ServerOptions(model_names=("m",), trusted_proxies=("10.0.0.0/8", "::1"))
    assert dataclasses.replace(options).trusted_proxies == ("10.0.0.0/8", "::1")
    with pytest.raises(ValueError, match="trusted_proxies must hold addresses"):
        ServerOptions(model_names=("m",), trusted_proxies=("*",))


def test_keys_are_not_printed():
    options = ServerOptions(model_names=("m",), api_keys=(ApiKey("secret", Client("a")),))
    assert "secret" not in json.dumps(repr(options))
