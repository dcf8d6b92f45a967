"""Releases: versions by weight, the same one for the same user, metrics by version, and changes while requests run."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import pytest

from transect.server.app import create_app
from transect.server.options import ServerOptions
from transect.server.releases import ReleasedVersion, choose_version

from .test_adapters import ASK, OPERATOR, AdapterEngine, make


@pytest.fixture
def settings(tmp_path):
    for name in ("one", "two"):
        make(tmp_path / "allowed", name)
    return {
        "model_names": ("base",),
        "allowed_lora_dir": str(tmp_path / "allowed"),
        "api_keys": ("guest",),
        "admin_api_keys": ("boss",),
        "releases": str(tmp_path / "releases.json"),
        "capture_dir": str(tmp_path / "captures"),
    }


@pytest.fixture
def app(engine, settings):
    app = create_app(AdapterEngine(engine), ServerOptions(**settings))
    yield app
    app.state.serving.captures.close()


@pytest.fixture
def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=ASK)


async def put(client, name, **weights):
    body = {"versions": [{"model": model, "weight": weight} for model, weight in weights.items()]}
    return await client.put(f"/v1/releases/{name}", json=body, headers=OPERATOR)


async def complete(client, model="prod", **more):
    reply = await client.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 2} | more)
    assert reply.status_code == 200, reply.text
    return reply


def test_keys_are_shared_by_weight():
    versions = [
        ReleasedVersion("a", 6.0),
        ReleasedVersion("b", 3.0),
        ReleasedVersion("c", 1.0),
        ReleasedVersion("off", 0.0),
    ]
    counts = Counter(choose_version(versions, f"user:{number}").model for number in range(20_000))
    assert all(abs(counts[each.model] / 20_000 - each.weight / 10) < 0.012 for each in versions)


def test_a_wider_canary_keeps_its_users_and_moves_nobody_else():
    narrow = [ReleasedVersion("a", 60.0), ReleasedVersion("b", 40.0), ReleasedVersion("new", 5.0)]
    wide = [ReleasedVersion("new", 30.0), ReleasedVersion("a", 60.0), ReleasedVersion("b", 40.0)]
    for number in range(5000):
        before, after = (choose_version(each, f"user:{number}").model for each in (narrow, wide))
        assert after in (before, "new")


async def test_one_user_has_one_version_in_every_api(client):
    assert (await put(client, "prod", one=1, two=1)).status_code == 200
    chosen = set()
    for user in map(str, range(12)):
        message = [{"role": "user", "content": f"{user} asks"}]
        asked = [
            ("/v1/completions", {"prompt": "a", "user": user}),
            ("/v1/chat/completions", {"messages": message, "safety_identifier": user}),
            ("/v1/responses", {"input": "b", "metadata": {"user_id": user}}),
            ("/v1/messages", {"messages": message, "max_tokens": 4, "metadata": {"user_id": user}}),
            ("/v1/embeddings", {"input": "c", "user": user}),
        ]
        versions = set()
        for path, body in asked:
            reply = await client.post(path, json=body | {"model": "prod"})
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == reply.headers["x-transect-version"]
            assert reply.headers["x-transect-release"] == "prod"
            versions.add(reply.json()["model"])
        assert len(versions) == 1
        chosen |= versions
    assert chosen == {"one", "two"}


async def test_a_conversation_keeps_its_version_and_others_are_drawn(client):
    await put(client, "prod", one=1, two=1)
    for number in range(8):
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": f"Hello {number}"}]
        seen = set()
        for _ in range(3):
            reply = (await client.post("/v1/chat/completions", json={"model": "prod", "messages": turns})).json()
            seen.add(reply["model"])
            turns += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        assert len(seen) == 1
        seen, last = set(), {}
        for _ in range(3):  # the server has the earlier turns
            body = {"model": "prod", "input": f"Hi {number}", "previous_response_id": last.get("id")}
            last = (await client.post("/v1/responses", json=body)).json()
            seen.add(last["model"])
        assert len(seen) == 1
    drawn = {(await complete(client)).json()["model"] for _ in range(40)}
    assert drawn == {"one", "two"}
    session = {(await complete(client, metadata={"session_id": "s1"})).json()["model"] for _ in range(8)}
    assert len(session) == 1


async def test_streams_name_their_version(client):
    await put(client, "prod", two=1)
    reply = await complete(client, stream=True)
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"two"} and reply.headers["x-transect-version"] == "two"
    assert "x-transect-version" not in (await complete(client, "two")).headers


async def test_the_base_may_be_a_version(client):
    await put(client, "prod", base=1)
    assert (await complete(client)).json()["model"] == "base"
    names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    assert names == ["base", "one", "two", "prod"]
    assert (await client.get("/v1/models/prod")).json()["id"] == "prod"
    counted = await client.post("/tokenize", json={"model": "prod", "prompt": "hi"})
    assert counted.json()["count"] == 2


@pytest.mark.parametrize(
    ("name", "versions", "status", "said"),
    [
        ("prod", [{"model": "three"}], 400, "'three' is not served"),
        ("prod", [{"model": "one"}, {"model": "one"}], 400, "twice"),
        ("prod", [{"model": "one", "weight": 0}], 400, "all weights are 0"),
        ("prod", [{"model": "one", "weight": -1}], 400, "weight"),
        ("prod", [], 400, "versions"),
        ("one", [{"model": "two"}], 409, "name of a served model"),
        ("base", [{"model": "two"}], 409, "name of a served model"),
        ("prod", [{"model": "prod"}], 400, "not served"),
    ],
)
async def test_bad_releases_are_refused(client, name, versions, status, said):
    reply = await client.put(f"/v1/releases/{name}", json={"versions": versions}, headers=OPERATOR)
    assert reply.status_code == status and said in reply.json()["error"]["message"], reply.text
    assert (await client.get("/v1/releases", headers=OPERATOR)).json()["data"] == []


async def test_releases_are_the_operators(client):
    await put(client, "prod", one=1)
    for method, path in (("GET", "/v1/releases"), ("GET", "/v1/releases/prod"), ("DELETE", "/v1/releases/prod")):
        assert (await client.request(method, path)).status_code == 403
    assert (await client.put("/v1/releases/x", json={"versions": [{"model": "one"}]})).status_code == 403
    assert (await client.get("/v1/releases/none", headers=OPERATOR)).status_code == 404
    assert (await client.delete("/v1/releases/prod", headers=OPERATOR)).json()["deleted"]
    missing = await client.post("/v1/completions", json={"model": "prod", "prompt": "hi"})
    assert missing.status_code == 404


async def test_a_version_that_is_taken_out_is_drained(client, engine):
    await put(client, "prod", one=1)
    running = asyncio.create_task(complete(client, prompt="HANG", max_tokens=10))
    while not engine.running:
        await asyncio.sleep(0.001)
    unload = {"lora_name": "one"}
    refused = await client.post("/v1/unload_lora_adapter", json=unload, headers=OPERATOR)
    assert refused.status_code == 409 and "release 'prod'" in refused.json()["error"]["message"]
    changed = (await put(client, "prod", two=1)).json()
    assert changed["draining"] == [{"model": "one", "running": 1}] and changed["versions"][0]["share"] == 1
    assert (await complete(client)).json()["model"] == "two"
    unloading = asyncio.create_task(client.post("/v1/unload_lora_adapter", json=unload, headers=OPERATOR))
    await asyncio.sleep(0)
    engine.go.set()
    assert (await running).json()["model"] == "one" and (await running).json()["choices"][0]["text"] == "Hello, wö"
    assert (await unloading).status_code == 200
    assert (await client.get("/v1/releases/prod", headers=OPERATOR)).json()["draining"] == []


async def test_releases_are_kept_in_their_file(client, engine, settings):
    await put(client, "prod", one=3, base=1)
    again = create_app(AdapterEngine(engine), ServerOptions(**settings | {"capture_dir": None}))
    assert (
        again.state.serving.releases.state("prod")["versions"]
        == (await client.get("/v1/releases/prod", headers=OPERATOR)).json()["versions"]
    )
    await client.delete("/v1/releases/prod", headers=OPERATOR)
    assert json.loads(Path(settings["releases"]).read_text()) == {}


async def test_a_file_with_unknown_versions_or_another_form_is_refused(engine, settings):
    for text, problem in (
        ('{"prod": {"versions": [{"model": "three"}]}}', "'three' is not served"),
        ('{"prod": ["one"]}', "give JSON such as"),
        ("prod = 1", "give JSON such as"),
    ):
        Path(settings["releases"]).write_text(text)
        with pytest.raises(ValueError, match=problem):
            create_app(AdapterEngine(engine), ServerOptions(**settings | {"capture_dir": None}))


async def test_metrics_by_version(client, engine):
    await put(client, "prod", one=1)
    form = {"response_format": {"type": "json_object"}}
    engine.reply = "I'm sorry, but I can't help with that."
    answer = (await complete(client, max_tokens=60)).json()["id"]
    engine.reply = '{"a": 1}'
    await complete(client, max_tokens=60, n=2, **form)
    await complete(client, max_tokens=3, **form)
    failed = await client.post("/v1/completions", json={"model": "prod", "prompt": "NAN"})
    assert failed.status_code == 500
    beams = await complete(client, use_beam_search=True, n=2, max_tokens=2)
    assert len(beams.json()["choices"]) == 2
    for given in ({"thumb": "up"}, {"score": 0.5}, {"correction": "Here it is."}):
        reply = await client.post("/v1/feedback", json={"id": answer} | given)
        assert reply.status_code == 200, reply.text
    lines = (await client.get("/metrics")).text.splitlines()
    shown = {}
    for line in lines:
        if line.startswith("transect_version") and 'release="prod"' in line:
            name, labels = line.split("{")
            verdict = labels.split('verdict="')[1].split('"')[0] if "verdict" in labels else ""
            shown[name.removeprefix("transect_version_") + verdict] = float(line.rpartition(" ")[2])
    assert shown["requests_total"] == 5 and shown["errors_total"] == 1
    assert shown["answers_total"] == 6 and shown["refusals_total"] == 1
    assert shown["formed_answers_total"] == 3 and shown["schema_failures_total"] == 1
    assert (shown["feedback_totalup"], shown["feedback_totalscore"], shown["feedback_totalcorrection"]) == (1, 1, 1)
    assert shown["feedback_score_total"] == 1.5 and shown["feedback_scores_total"] == 2
    assert shown["time_to_first_token_seconds_count"] == 4 and shown["inter_token_latency_seconds_count"] == 4
    assert shown["running"] == 0 and shown["share"] == 1


async def test_captures_name_release_version_and_adapter(client, settings):
    from transect.flow.watch import captures

    await put(client, "prod", one=1)
    await complete(client)
    await client.post("/v1/feedback", json={"id": "0" * 32, "thumb": "up"})
    (record,) = captures.read(settings["capture_dir"])
    assert (record["model"], record["release"]) == ("one", "prod") and record["adapter"]
