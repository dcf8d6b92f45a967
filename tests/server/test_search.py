"""Searches over HTTP: how they are asked for, what streams show, what is counted, and what is refused."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from transect.server.app import create_app
from transect.server.options import ServerOptions

PATIENCE_S = 200

ASKED = {"model": "fake-model", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 40}
VOTES = ["It is 4", "It is 5", "I say 4", "So: 4", "Maybe 7", "4"]


def votes(text, choice, seed):
    """The branches of a vote; a verifier that is asked says yes to fours."""
    if "Reply with Yes" in text:
        return "Yes" if text.rpartition("[assistant]")[2].partition("[user]")[0].endswith("4") else "No"
    return VOTES[choice % len(VOTES)]


async def post(client, path="/v1/chat/completions", **fields):
    return await client.post(path, json=ASKED | fields)


async def ask(client, path="/v1/chat/completions", **fields):
    reply = await post(client, path, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def events(client, path="/v1/chat/completions", **fields):
    """The data of a stream, in order."""
    async with client.stream("POST", path, json=ASKED | {"stream": True} | fields) as reply:
        lines = [line async for line in reply.aiter_lines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


async def test_a_vote_is_one_answer_and_all_branches_are_counted(client, engine):
    engine.script = votes
    found = await ask(client, search={"method": "majority", "n": 6}, seed=1)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "It is 4" and choice["finish_reason"] == "stop"
    assert found["search"]["votes"]["4"] >= 3 and found["search"]["chosen"] == 0
    ((name, params, _),) = engine.seen  # one request: the prompt is computed once
    assert params.n == 6 and name.endswith("-0-0")
    drawn = sum(branch["tokens"] for branch in found["search"]["branches"])
    assert found["usage"]["completion_tokens"] == found["search"]["tokens"] >= drawn > len("It is 4")


async def test_the_losers_of_a_decided_vote_are_dropped(client, engine):
    engine.script = lambda text, choice, seed: "a long story that ends with 9" if choice == 3 else "4"
    found = await ask(client, search={"method": "majority", "n": 4})
    assert found["choices"][0]["message"]["content"] == "4"
    assert [branch["state"] for branch in found["search"]["branches"]] == ["ended"] * 3 + ["dropped"]
    assert found["usage"]["completion_tokens"] < 3 + len("a long story")


async def test_ordinary_clients_read_a_stream_as_text(client, engine):
    """Every chunk has a choice with a delta; progress adds nothing to the text."""
    engine.script = votes
    chunks = await events(client, search={"method": "majority", "n": 6}, stream_options={"include_usage": True})
    *chunks, usage = chunks
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "It is 4" and chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    states = [chunk["search"] for chunk in chunks if "search" in chunk]
    assert states[0]["alive"] >= 0 and "branches" in states[-1]
    assert usage["usage"]["completion_tokens"] == states[-1]["tokens"]


async def test_progress_shows_branches_and_votes(client, engine):
    engine.script = lambda text, choice, seed: "4" * (2 + 3 * choice)
    chunks = await events(client, search={"method": "adaptive", "n": 4, "wave": 4, "certainty": 1})
    states = [chunk["search"] for chunk in chunks if "alive" in chunk.get("search", {})]
    assert {"method", "alive", "ended", "dropped", "tokens", "votes"} <= states[-1].keys()


async def test_a_budget_of_seconds_buys_branches_at_the_price_of_now(client, engine):
    """The engine predicts 100 s for a step with one more row: no second wave is worth a start."""
    plain = await engine.stats()

    async def dear():
        return msgspec.structs.replace(plain, next_step_seconds=90.0, next_row_seconds=10.0)

    engine.script, engine.stats, engine.config = votes, dear, SimpleNamespace(block_size=16)
    search = {"method": "adaptive", "n": 6, "wave": 2, "certainty": 1, "budget": {"seconds": 60}}
    found = (await ask(client, search=search))["search"]
    assert found["ended_by"] == "cost" and len(found["branches"]) == 2
    assert found["forks"][0]["step_ms"] == 90_000 and found["forks"][0]["branches"] == 1


async def test_prefixes_of_models_select_methods(client, engine):
    engine.script = votes
    found = await ask(client, model="bon-fake-model", search={"n": 3})
    assert found["search"]["method"] == "best_of_n" and found["model"] == "fake-model"
    assert found["choices"][0]["message"]["content"] == "I say 4"  # the fake's third choice is the likeliest
    assert (await ask(client, model="moa-alias"))["search"]["method"] == "mixture"
    assert "search" not in await ask(client)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"search": {"method": "best"}}, "search.method must be one of adaptive, beam"),
        ({"search": {"n": 3}}, "search must be an object such as"),
        ({"search": {"method": "majority", "n": 1000}}, "search.n must be a whole number of at least 1 and at"),
        ({"search": {"method": "majority", "n": "4"}}, "search.n must be whole number, not '4'"),
        ({"search": {"method": "majority", "rounds": 2}}, "majority has no setting search.rounds; it takes n,"),
        ({"search": {"method": "majority", "extract": "re"}}, "search.extract must be"),
        ({"search": {"method": "majority", "budget": -3}}, "search.budget must be at least 1 token"),
        ({"search": {"method": "majority", "budget": {"minutes": 1}}}, "search.budget must be a number of tokens"),
        ({"search": {"method": "best_of_n", "score": "import os"}}, "search.score must be one of likelihood, verdict"),
        ({"search": {"method": "beam", "n": 2, "width": 4}}, "search.width must be at most n"),
        ({"search": {"method": "mixture", "adapters": ["x"]}}, "search.adapters names 'x'"),
        ({"search": {"method": "majority"}, "temperature": 0}, "temperature must be above 0 with the search majority"),
        ({"search": {"method": "majority"}, "n": 2}, "n must be 1 with a search"),
        ({"search": {"method": "majority"}, "logprobs": True}, "logprobs cannot be combined with a search"),
        ({"model": "moa-fake-model", "search": {"method": "beam"}}, "the model's prefix means mixture"),
    ],
)  # fmt: skip
async def test_bad_settings_are_refused_by_name(client, engine, fields, sentence):
    reply = await post(client, **fields)
    assert reply.status_code == 400 and sentence in reply.json()["error"]["message"], reply.text
    assert not engine.seen


async def test_an_unknown_prefix_is_an_unknown_model(client):
    reply = await post(client, model="rstar-fake-model")
    assert reply.status_code == 404


async def test_a_verifier_of_the_same_model_chooses(client, engine):
    engine.script = votes
    found = await ask(client, search={"method": "best_of_n", "n": 4, "score": "verdict"})
    scores = [branch["scores"]["verdict"] for branch in found["search"]["branches"]]
    assert found["choices"][0]["message"]["content"].endswith("4") and scores[1] < scores[0]
    assert len(engine.seen) == 5  # the branches, and four questions


async def test_responses_and_messages_search_too(client, engine):
    engine.script = votes
    fields = {"search": {"method": "majority", "n": 6}}
    asked = {"model": "fake-model", "input": "2+2?", **fields}
    found = (await client.post("/v1/responses", json=asked)).json()
    assert found["output"][0]["content"][0]["text"] == "It is 4" and found["search"]["votes"]["4"] >= 3
    assert found["usage"]["output_tokens"] == found["search"]["tokens"]
    found = (await client.post("/v1/messages", json=ASKED | fields)).json()
    assert found["content"][0]["text"] == "It is 4" and found["usage"]["output_tokens"] == found["search"]["tokens"]


async def test_their_streams_show_progress_in_events_that_clients_skip(client, engine):
    engine.script = votes
    fields = {"search": {"method": "majority", "n": 6}, "stream": True}
    async with client.stream("POST", "/v1/responses", json={"model": "fake-model", "input": "2+2?", **fields}) as reply:
        kinds = [line[7:] async for line in reply.aiter_lines() if line.startswith("event: ")]
    assert kinds[0] == "response.created" and "response.search.progress" in kinds and kinds[-1] == "response.completed"
    found = await events(client, "/v1/messages", **fields)
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "message_stop"
    assert all(each["type"] == "ping" for each in found if "search" in each) and any("search" in each for each in found)


async def test_a_client_that_leaves_ends_all_branches(live, engine):
    engine.script = lambda text, choice, seed: f"HANG {choice}" + "x" * 30
    asked = ASKED | {"messages": [{"role": "user", "content": "HANG"}], "search": {"method": "majority", "n": 4}}
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(base_url=live, timeout=PATIENCE_S) as browser:
        asking = asyncio.create_task(browser.post("/v1/chat/completions", json=asked))
        while not engine.running:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        while engine.running:
            await asyncio.sleep(0.01)
    assert len(engine.aborted) == 1


async def test_a_server_bounds_searches_and_lists_prefixes_if_asked_to(engine):
    engine.script = lambda text, choice, seed: "4" * 30
    options = ServerOptions(model_names=("m",), search_budget=20, search_models=True)
    transport = httpx.ASGITransport(create_app(engine, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        found = await ask(client, model="m", search={"method": "majority", "n": 4})
        assert found["search"]["ended_by"] == "tokens" and found["choices"][0]["finish_reason"] == "length"
        assert sum(branch["tokens"] for branch in found["search"]["branches"]) == 20
        names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
        assert "m" in names and "bon-m" in names and "moa-m" in names


async def test_models_are_listed_without_prefixes_by_default(client):
    names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    assert names == ["fake-model", "alias"]


def test_judges_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="likelihood is the name of another judge"):
        ServerOptions(model_names=("m",), verifiers=("likelihood=f.py:g",))
    with pytest.raises(ValueError, match="--verifier takes NAME=PLACE"):
        ServerOptions(model_names=("m",), verifiers=("f.py:g",))
