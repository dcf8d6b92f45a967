"""Everything that can be wrong with a request, on the fake engine: status, shape, and what the message names."""

import asyncio
import json

import httpx
import pytest

from transect.server.app import create_app
from transect.server.options import ServerOptions
from transect.text.number_text import NumberText

CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PROMPT = {"model": "fake-model", "prompt": "Hi"}


def detail(response, status):
    """The error of a response, after checking its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "Traceback" not in response.text
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temprature": 1}, "temprature", ["unknown field", "'temperature'"]),
        ({"zzzzzz": 1}, "zzzzzz", ["unknown field"]),
        ({"temperature": -1}, "temperature", ["[0, 100]"]),
        ({"temperature": "hot"}, "temperature", ["number"]),
        ({"top_p": 0}, "top_p", ["(0, 1]"]),
        ({"min_p": 2}, "min_p", []),
        ({"n": 0}, "n", ["at least 1"]),
        ({"n": True}, "n", ["integer"]),
        ({"n": 10**30}, "n", []),
        ({"max_tokens": 0}, "max_tokens", ["at least 1"]),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ["at least 1"]),
        ({"max_tokens": 1.5}, "max_tokens", ["integer"]),
        ({"max_tokens": 2, "min_tokens": 5}, "min_tokens", []),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", ["20"]),
        ({"top_logprobs": 2}, "top_logprobs", ["logprobs=true"]),
        ({"logit_bias": {"x": 1}}, "logit_bias", ["token ids"]),
        ({"logit_bias": {"5": 1000}}, "logit_bias", ["100"]),
        ({"stop": [1]}, "stop", ["string or a list of strings"]),
        ({"stop": ""}, "stop", ["non-empty"]),
        ({"stop_token_ids": [-1]}, "stop_token_ids", []),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream=true"]),
        ({"stream": True, "stream_options": {"include_usag": True}}, "include_usag", ["'include_usage'"]),
        ({"tools": [{"type": "function"}]}, "tools", ["tools[0]", "name"]),
        ({"tools": [{"type": "web_search"}]}, "tools", ["'web_search'", "function"]),
        ({"tools": [TOOL, TOOL]}, "tools", ["tools[1]", "another tool"]),
        ({"tools": [TOOL], "tool_choice": "ad"}, "tool_choice", ["one of the tools (add)"]),
        ({"tools": [TOOL], "tool_choice": {"function": "add"}}, "tool_choice", ["one of the tools (add)"]),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": ["add"]}}}, "tool_choice", ["one of the tools (add)"]),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", ["a mode, auto or required"]),
        ({"tool_choice": "required"}, "tool_choice", ["needs tools"]),
        ({"response_format": {"type": "xml"}}, "response_format", ["json_schema", "'xml'"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", ["schema"]),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", ["exactly one", "json and regex"]),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", ["'jsn'"]),
        ({"guided_choice": []}, "guided_choice", ["1 to"]),
        ({"guided_choice": [""]}, "guided_choice", ["empty"]),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", ["give only one"]),
        ({"messages": []}, "messages", ["is empty: give at least 1"]),
        ({"messages": "Hi"}, "messages", []),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", ["messages[0].role"]),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", ["messages[0].content", "string"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", ["text"]),
        ({"messages": [{"role": "user", "contents": "x"}]}, "contents", ["'content'", "messages[0]"]),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", []),
        ({"seed": 2**64}, "seed", []),
    ],
)
async def test_bad_chat_fields(client, engine, change, param, words):
    error = detail(await client.post("/v1/chat/completions", json={**CHAT, **change}), 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert not engine.seen


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ""}, ["empty"]),
        ({"prompt": []}, ["empty"]),
        ({"prompt": ["a", ""]}, ["empty"]),
        ({"prompt": {"a": 1}}, ["a string, a list of strings"]),
        ({"prompt": [1, "a"]}, ["a string, a list of strings"]),
        ({"prompt": [5, 257]}, ["257", "256"]),
        ({"prompt": ["a"] * 257}, ["256"]),
        ({"prompt": "x" * 200}, ["This model's maximum context length is 200 tokens. However, ", "at most 199"]),
        ({"best_of": 3, "stream": True}, ["best_of"]),
        ({"suffix": "x"}, ["no tokens for filling in"]),
        ({"echo": True, "logprobs": 1, "stream": True}, ["stream=false"]),
        ({"logprobs": 21}, ["20"]),
        ({"max_tokens": 0}, ["at least 1"]),
    ],
)
async def test_bad_completion_fields(client, engine, change, words):
    error = detail(await client.post("/v1/completions", json={**PROMPT, **change}), 400)
    assert all(word in error["message"] for word in words), error["message"]
    assert not engine.seen


async def test_over_long_prompt_has_openais_code(client):
    long = [{"role": "user", "content": "x" * 300}]
    error = detail(await client.post("/v1/chat/completions", json={"messages": long}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_unknown_model_names_the_nearest(client):
    error = detail(await client.post("/v1/completions", json={**PROMPT, "model": "fake-modle"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model") and "'fake-model'" in error["message"]
    error = detail(await client.post("/v1/completions", json={**PROMPT, "model": "gpt-4"}), 404)
    assert "'fake-model', 'alias'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"),
        (b"{", "JSON"),
        (b'{"model": ', "JSON"),
        (b"[]", "JSON object"),
        (b"5", "JSON object"),
        (b'"x"', "JSON object"),
        (b"{}", "required"),
        (b'{"prompt": NaN}', "JSON"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b"[" * 9000, "JSON"),
    ],
)
async def test_bodies_that_are_no_request(client, path, body, words):
    if (path, body) == ("/tokenize", b"{}"):
        words = "give either prompt or messages"
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert words in detail(response, 400)["message"]


async def test_other_content_types(client):
    response = await client.post("/v1/completions", content=json.dumps(PROMPT).encode())
    assert "application/json" in detail(response, 415)["message"]
    response = await client.post("/v1/completions", data={"prompt": "x"})
    detail(response, 415)


async def test_oversized_body_by_length_and_by_chunks(client):
    body = json.dumps({**PROMPT, "prompt": "x" * 20_000}).encode()
    response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = detail(response, 413)
    assert "20000 bytes" in error["message"] and response.headers["connection"] == "close"

    async def chunks():
        for _ in range(50):
            yield b"x" * 1000

    response = await client.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    detail(response, 413)


async def test_unknown_route_and_wrong_method(client):
    assert "/v2/nothing" in detail(await client.get("/v2/nothing"), 404)["message"]
    response = await client.get("/v1/completions")
    assert "POST" in detail(response, 405)["message"] and response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_says_when_to_come_back(client, stream):
    response = await client.post("/v1/completions", json={**PROMPT, "prompt": ["ok", "FULL"], "stream": stream})
    error = detail(response, 503)
    assert error["type"] == "service_unavailable_error" and response.headers["retry-after"] == "3"


async def test_a_limit_of_the_client_s_own_is_a_429(client):
    response = await client.post("/v1/completions", json={**PROMPT, "prompt": "OWN LIMIT"})
    error = detail(response, 429)
    assert error["type"] == "rate_limit_error" and response.headers["retry-after"] == "3"
    assert error["message"].startswith("this client has enough")


async def test_full_queue_ends_the_other_prompts_of_the_request(client, engine):
    detail(await client.post("/v1/completions", json={**PROMPT, "prompt": ["HANG", "FULL"]}), 503)
    assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_by_the_engine_is_a_400_also_for_streams(client, stream):
    error = detail(await client.post("/v1/completions", json={**PROMPT, "prompt": "REFUSE", "stream": stream}), 400)
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize(("word", "status"), [("DIE", 503), ("NAN", 500)])
async def test_failure_on_the_way_is_one_clean_error(client, engine, word, status):
    body = {**PROMPT, "prompt": word}
    detail(await client.post("/v1/completions", json=body), status)
    response = await client.post("/v1/completions", json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200 and events[-1] == "[DONE]"
    errors = [json.loads(event) for event in events[:-1] if "error" in event]
    assert len(errors) == 1 and json.loads(events[-2]) == errors[0]
    assert set(errors[0]["error"]) == {"message", "type", "param", "code"}
    assert not any(choice["finish_reason"] for event in events[:-2] for choice in json.loads(event)["choices"])
    assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
async def test_request_timeout(engine, stream, monkeypatch):
    """The loop's clock advances by an hour once the engine has begun, however long the machine takes until then."""
    loop, wait, ahead = asyncio.get_running_loop(), engine.go.wait, [0.0]
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + ahead[0])
    monkeypatch.setattr(engine.go, "wait", lambda: ahead.__setitem__(0, 3600.0) or wait())
    app = create_app(engine, ServerOptions(model_names=("fake-model",), request_timeout_s=3000.0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        response = await client.post("/v1/completions", json={**PROMPT, "prompt": "HANG", "stream": stream})
    if stream:
        assert response.text.count("request_timeout") == 1 and response.text.endswith("data: [DONE]\n\n")
    else:
        assert detail(response, 504)["code"] == "request_timeout"
    assert not engine.running and len(engine.aborted) == 1


async def test_api_keys(engine):
    app = create_app(engine, ServerOptions(model_names=("m",), api_keys=("secret", "other")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer"},
        ):
            response = await client.get("/v1/models", headers=headers)
            assert detail(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer" and "secret" not in response.text
        for key in ("secret", "other"):
            assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


async def test_draining_refuses_new_work_and_counts_the_old(client, app, engine):
    serving = app.state.serving
    running = asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "prompt": "HANG"}))
    while not engine.running:
        await asyncio.sleep(0)
    serving.draining = True
    response = await client.post("/v1/completions", json=PROMPT)
    assert detail(response, 503)["code"] == "draining" and response.headers["connection"] == "close"
    assert serving.in_flight == 1 and not serving.idle.is_set()
    engine.go.set()
    assert (await running).status_code == 200
    assert serving.in_flight == 0 and serving.idle.is_set()


async def call(app, body, receive_after_body):
    """Speak ASGI to the app: send a body, then whatever ``receive_after_body`` gives. Returns what the app sent."""
    sent, parts = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        return parts.pop() if parts else await receive_after_body()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("x", 1),
        "server": ("x", 2),
    }
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_ends_its_request(app, engine, stream):
    async def leave():
        while not engine.running:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        return {"type": "http.disconnect"}

    await call(app, {**PROMPT, "prompt": ["HANG", "HANG"], "stream": stream}, leave)
    assert not engine.running and len(engine.aborted) == 2
    assert app.state.serving.in_flight == 0
    counted = app.state.serving.metrics.finished.collect()[0].samples
    assert [(each.labels["finish_reason"], each.value) for each in counted if each.name.endswith("_total")] == [
        ("abort", 2.0)
    ]


async def test_unexpected_exception_is_a_plain_500(client, engine, monkeypatch):
    async def broken(*args, **kwargs):
        raise KeyError("secret detail")
        yield

    monkeypatch.setattr(engine, "stream", broken)
    response = await client.post("/v1/completions", json=PROMPT)
    assert "secret" not in response.text
    assert detail(response, 500)["type"] == "server_error"


async def test_text_for_a_model_without_a_tokenizer(client, engine):
    engine.tokenizer, engine.chat_template = NumberText(257), None
    answers = [
        await client.post("/v1/completions", json={"prompt": "some text"}),
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}),
        await client.post("/tokenize", json={"prompt": "x"}),
    ]
    assert [answer.status_code for answer in answers] == [400, 400, 400]
    assert "no tokenizer: give the prompt as token ids" in answers[0].json()["error"]["message"]
    ids = await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
    assert ids.json()["choices"][0]["text"] == " 72 101"
