"""What vLLM's API has beyond OpenAI's, on the fake engine."""

import asyncio
import dataclasses
import json
import re

import httpx
import pytest

from transect import __version__
from transect.server.app import create_app
from transect.server.operations import request_log
from transect.text.chat_template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "fake-model", "prompt": "Hi", "max_tokens": 4}
REPLY = "Hello, wörld. END of it"


async def events(client, path, body):
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        text = (await response.aread()).decode()
    assert response.status_code == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


async def refused(client, path, body, words):
    answer = await client.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    return answer.json()["error"]


# Operators' routes --------------------------------------------------------------------------------------------------


async def test_what_operators_ask(client, engine):
    assert (await client.get("/version")).json() == {"version": __version__}
    assert (await client.get("/load")).json() == {"server_load": 0}
    info = (await client.get("/tokenizer_info")).json()
    assert info["vocab_size"] == 257 and info["model_max_length"] == 200 and info["chat_template"] == TEMPLATE
    assert (info["bos_token"], info["eos_token_ids"]) == (None, [256])
    assert (await client.post("/reset_prefix_cache")).status_code == 200 and engine.resets == 1
    for ask in (client.get, client.post):
        assert (await ask("/ping")).status_code == 200
    engine.state = "dead"
    assert (await client.get("/ping")).status_code == 503
    assert (await client.post("/reset_prefix_cache")).json()["error"]["code"] == "engine_dead"


async def test_load_counts_what_runs(client, engine):
    waiting = asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "prompt": "HANG", "max_tokens": 9}))
    while not engine.running:
        await asyncio.sleep(0.01)
    assert (await client.get("/load")).json() == {"server_load": 1}
    engine.go.set()
    await waiting


async def test_keys_are_wanted_but_for_load_balancers(engine, options):
    app = create_app(engine, dataclasses.replace(options, api_keys=("secret",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.get("/ping")).status_code == 200
        for path in ("/version", "/load", "/tokenizer_info"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/reset_prefix_cache")).status_code == 401 and not engine.resets


async def test_request_ids_come_back(client):
    for path in ("/version", "/nowhere"):
        answer = await client.get(path, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
    new = [(await client.get("/version")).headers["x-request-id"] for _ in range(2)]
    assert new[0] != new[1] and all(len(name) == 32 for name in new)
    for bad in ("x" * 129, "two words"):
        assert len((await client.get("/version", headers={"X-Request-Id": bad})).headers["x-request-id"]) == 32


# Prompts ------------------------------------------------------------------------------------------------------------


async def test_the_end_of_a_long_prompt(client):
    body = {**PROMPT, "prompt": "abcdef", "truncate_prompt_tokens": 3}
    answer = (await client.post("/v1/completions", json={**body, "echo": True, "return_token_ids": True})).json()
    assert answer["usage"]["prompt_tokens"] == 3 and answer["choices"][0]["text"] == "def" + REPLY[:4]
    long = {**PROMPT, "prompt": "x" * 300, "truncate_prompt_tokens": -1}
    assert (await client.post("/v1/completions", json=long)).json()["usage"]["prompt_tokens"] == 200 - 4
    chat = {"messages": [{"role": "user", "content": "x" * 300}], "truncate_prompt_tokens": 10}
    assert (await client.post("/v1/chat/completions", json=chat)).json()["usage"]["prompt_tokens"] == 10
    tokens = (await client.post("/tokenize", json={"prompt": "abc", "truncate_prompt_tokens": 2})).json()
    assert tokens["tokens"] == list(b"bc")
    for wrong, words, most in ((0, "at least 1, or -1", 4), (-2, "at least 1, or -1", 4), (-1, "leave no room", 200)):
        body = {**PROMPT, "truncate_prompt_tokens": wrong, "max_tokens": most}
        assert (await refused(client, "/v1/completions", body, words))["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("content", ["Once upon ", [{"type": "text", "text": "Once upon "}]])
async def test_going_on_with_the_last_message(client, content):
    messages = [*CHAT["messages"], {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert bytes(tokens) == b"[user]Hi[assistant]Once upon "
    answer = await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
    assert answer.json()["prompt_token_ids"] == tokens
    ended = (await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert bytes(ended["tokens"]) == b"[user]Hi[assistant]Once upon "
    both = {**body, "add_generation_prompt": True}
    assert (await refused(client, "/v1/chat/completions", both, "leave add_generation_prompt out"))["param"] == (
        "continue_final_message"
    )


async def test_a_last_message_that_cannot_be_gone_on_with(client, engine):
    nothing = {"messages": [{"role": "assistant", "content": None}], "continue_final_message": True}
    await refused(client, "/v1/chat/completions", nothing, "needs a last message with text")
    engine.chat_template = ChatTemplate("{{ messages | length }}")
    lost = {**CHAT, "continue_final_message": True}
    await refused(client, "/v1/chat/completions", lost, "does not show the last message")


# Answers ------------------------------------------------------------------------------------------------------------


async def test_token_ids_beside_text(client):
    ids = list(REPLY.encode())
    answer = (await client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})).json()
    assert answer["choices"][0]["token_ids"] == ids and bytes(answer["prompt_token_ids"]) == b"[user]Hi[a]"
    answer = (await client.post("/v1/completions", json={**PROMPT, "return_token_ids": True})).json()
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids[:4], list(b"Hi"))
    chunks = await events(client, "/v1/chat/completions", {**CHAT, "return_token_ids": True})
    assert bytes(chunks[0]["prompt_token_ids"]) == b"[user]Hi[a]"
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or ()] == ids
    chunks = await events(client, "/v1/completions", {**PROMPT, "n": 2, "return_token_ids": True})
    firsts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["prompt_token_ids"] is not None]
    assert [(choice["index"], choice["prompt_token_ids"]) for choice in firsts] == [(0, [72, 105]), (1, [72, 105])]
    plain = (await client.post("/v1/completions", json=PROMPT)).json()["choices"][0]
    assert plain["token_ids"] is None and plain["prompt_token_ids"] is None


async def test_logprobs_of_the_prompt(client):
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        answer = (await client.post(path, json={**body, "prompt_logprobs": 1})).json()
        found = (answer["choices"][0] if "prompt" in body else answer)["prompt_logprobs"]
        assert found[0] is None
        assert found[1][str(ord("i") if "prompt" in body else ord("u"))] == {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": "i" if "prompt" in body else "u",
        }
        assert found[1]["65"]["logprob"] == -9999.0
        await refused(client, path, {**body, "prompt_logprobs": 1, "stream": True}, "needs stream=false")
        await refused(
            client, path, {**body, "prompt_logprobs": 21}, "prompt_logprobs must be at least 0 and at most 20"
        )


async def test_the_best_of_several(client, engine):
    body = {**PROMPT, "best_of": 4, "n": 2, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert engine.seen[0][1].n == 4 and [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 16 and answer["choices"][0]["logprobs"] is None
    answer = (await client.post("/v1/completions", json={**body, "n": 1, "logprobs": 0})).json()
    (choice,) = answer["choices"]
    assert set(choice["logprobs"]["token_logprobs"]) == {-0.25}, "the third is the likeliest"
    await refused(client, "/v1/completions", {**PROMPT, "best_of": 2, "n": 3}, "best_of must be at least n (3)")
    await refused(client, "/v1/completions", {**PROMPT, "best_of": 129}, "at most 128")
    await refused(client, "/v1/completions", {**PROMPT, "best_of": 2, "stream": True}, "needs stream=false")
    assert (await client.post("/v1/completions", json={**PROMPT, "best_of": 1})).status_code == 200


# Behind a proxy, and in the log -------------------------------------------------------------------------------------


async def test_under_the_path_of_a_proxy(engine, options):
    app = create_app(engine, dataclasses.replace(options, root_path="/llm", api_keys=("secret",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        headers = {"Authorization": "Bearer secret"}
        for prefix in ("", "/llm"):  # proxies strip it, or do not
            answer = await client.post(f"{prefix}/v1/completions", json=PROMPT, headers=headers)
            assert answer.json()["choices"][0]["text"] == REPLY[:4]
            assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get("/openapi.json", headers=headers)).json()["servers"] == [{"url": "/llm"}]
    for wrong in ("llm", "/llm/"):
        with pytest.raises(ValueError, match="must begin with a slash and not end with one"):
            dataclasses.replace(options, root_path=wrong)


@pytest.fixture
def logged(capsys):
    """What the request log wrote; off again afterwards."""
    yield lambda: capsys.readouterr().err.splitlines()
    request_log.configure("off", "info")


async def test_a_line_of_json_for_each_request(client, logged):
    request_log.configure("json", "info")
    await client.post("/v1/completions", json={**PROMPT, "n": 2, "user": "me"}, headers={"X-Request-Id": "mine"})
    await events(client, "/v1/chat/completions", CHAT)
    await client.get("/nowhere")
    await client.get("/health")
    whole, stream, lost = map(json.loads, logged())
    assert whole["time"].endswith("Z") and whole["seconds"] >= whole["first_token_seconds"] >= 0
    expected = {"level": "info", "method": "POST", "path": "/v1/completions", "status": 200, "id": "mine"}
    counts = {"prompt_tokens": 2, "completion_tokens": 8, "cached_tokens": 1, "finish_reasons": ["length"] * 2}
    assert whole.items() >= (expected | counts).items()
    assert stream["completion_tokens"] == len(REPLY.encode()) and stream["path"] == "/v1/chat/completions"
    assert (lost["level"], lost["status"]) == ("warning", 404)
    assert "Hello" not in json.dumps([whole, stream])


async def test_lines_of_text_of_a_level(client, engine, logged):
    request_log.configure("text", "error")
    await client.post("/v1/completions", json=PROMPT)
    await client.get("/nowhere")
    assert logged() == []
    engine.state = "dead"
    await client.post("/reset_prefix_cache", headers={"X-Request-Id": "mine"})
    (line,) = logged()
    assert re.fullmatch(r"transect: \S+Z error POST /reset_prefix_cache 503 seconds=\S+ id=mine", line)


FORGED = "/a%0atransect: 2026-01-01T00:00:00.000Z info GET /forged 200 id=x%1b[31m%c2%85%e2%80%a8%ff status=200"


@pytest.mark.parametrize("kind", ["text", "json"])
async def test_paths_forge_no_lines_fields_or_colours(client, logged, kind):
    request_log.configure(kind, "info")
    response = await client.get(FORGED)
    assert response.status_code == 404
    (line,) = logged()
    assert all(0x20 <= ord(letter) < 0x7F for letter in line)
    if kind == "json":
        assert json.loads(line)["path"].startswith("/a%0Atransect:%20")
    else:
        assert line.split()[3:6] == ["GET", line.split()[4], "404"] and line.split()[4].startswith("/a%0Atransect:%20")


async def test_words_that_may_come_and_that_must_not(client, engine):
    body = {**PROMPT, "allowed_token_ids": [72, 101], "bad_words": ["no", "never"]}
    for path, more in (("/v1/completions", body), ("/v1/chat/completions", {**CHAT, **body})):
        more = {name: value for name, value in more.items() if "chat" not in path or name != "prompt"}
        assert (await client.post(path, json=more)).status_code == 200
        params = engine.seen[-1][1]
        assert params.allowed_token_ids == (72, 101) and params.bad_words == ("no", "never")
        assert (await refused(client, path, {**more, "allowed_token_ids": []}, "is empty"))["param"] == (
            "allowed_token_ids"
        )
        await refused(client, path, {**more, "bad_words": ["x"] * 200}, "bad_words holds 200 entries")


# Beam search --------------------------------------------------------------------------------------------------------


async def test_beams_are_extended_token_by_token(client, engine):
    """The fake's likeliest token is always its reply's first; the other one that it names has no probability."""
    body = {**PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 1, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["HHH", "AAA"]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 2
    assert len(engine.seen) == 1 + 2 + 2 and {params.max_tokens for _, params, _ in engine.seen} == {1}
    stopped = {**body, "n": 1, "best_of": 2, "stop": ["HH"], "max_tokens": 9}
    (choice,) = (await client.post("/v1/completions", json=stopped)).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "HH")
    chat = {**CHAT, "use_beam_search": True, "n": 2, "max_tokens": 3}
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["HHH", "AAA"]


@pytest.mark.parametrize(
    ("changes", "words", "param"),
    [
        ({"stream": True}, "set stream=false", "use_beam_search"),
        ({"n": 11}, "n must be a whole number of 1 to 10", "n"),
        ({"temperature": 0.7}, "temperature must be 0 or 1 with beam search", "temperature"),
        ({"top_p": 0.5}, "leave top_p out", "top_p"),
        ({"bad_words": ["x"]}, "leave bad_words out", "bad_words"),
        ({"response_format": {"type": "json_object"}}, "a response format", "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "set use_beam_search", "length_penalty"),
    ],
)
async def test_what_beams_do_not_go_with(client, changes, words, param):
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        error = await refused(client, path, {**body, "use_beam_search": True, **changes}, words)
        assert error["param"] == param
    neutral = {**PROMPT, "use_beam_search": True, "top_p": 1.0, "top_k": -1, "bad_words": [], "temperature": 0}
    assert (await client.post("/v1/completions", json=neutral)).status_code == 200
