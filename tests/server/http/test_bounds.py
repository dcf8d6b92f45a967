"""Bodies with a great many values, or great ones: refused by count, up to the first fault, and not echoed."""

import json

import pytest

from transect.server.app import create_app
from transect.server.http import errors
from transect.server.openai.protocol import CompletionRequest
from transect.server.options import ServerOptions

MANY = 20_000
JSON = {"content-type": "application/json"}


@pytest.fixture
def app(engine):
    return create_app(engine, ServerOptions(model_names=("fake-model",)))


async def refused(client, path, body, status=400):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(path, content=content, headers=JSON)
    assert response.status_code == status, response.text[:300]
    assert len(response.content) < 2000
    return response.json()["error"]


@pytest.mark.parametrize(
    ("values", "words"),
    [("[],", "131072 lists and objects"), ("{},", "131072 lists and objects"), ("1,", "1048576 commas")],
)
async def test_values_are_counted_before_they_are_parsed(client, monkeypatch, values, words):
    def from_json(*args, **kwargs):
        pytest.fail("it was parsed")

    monkeypatch.setattr("pydantic_core.from_json", from_json)
    body = b'{"prompt": [' + values.encode() * (2**20 + 1) + b"1]}"
    error = await refused(client, "/v1/completions", body, 413)
    assert words in error["message"] and error["code"] == "request_too_large"


async def test_long_texts_may_hold_many_of_those_characters(client, engine):
    engine.max_model_len = 10**6
    response = await client.post("/v1/completions", json={"prompt": "[1, {}, " * 50_000, "max_tokens": 1})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": ["a"] * MANY + [1]}, "must be a string, a list of strings"),
        ("/v1/completions", {"prompt": [[1]] * MANY + ["a"]}, "must be a string, a list of strings"),
        ("/v1/completions", {"prompt": [-1] * MANY}, "must be a string, a list of strings"),
        ("/v1/completions", {"prompt": [[1, 2**31]]}, "must be a string, a list of strings"),
        ("/v1/completions", {"prompt": [True]}, "must be a string, a list of strings"),
        ("/v1/completions", {"prompt": "a", "stop": [1] * MANY}, "stop must be a string or a list of strings"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
        ("/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}, "at most 1024"),
        (
            "/v1/chat/completions",
            {"messages": [{}] * MANY},
            "hold 20000 messages and parts: give at most 10000",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{}] * MANY}]},
            "hold 20001 messages and parts",
        ),
        ("/v1/chat/completions", {"messages": [{}] * 9000}, "messages[0].role is required"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [5] * 9000}]},
            "messages[0].content must be",
        ),
        ("/tokenize", {"messages": [{}] * MANY}, "hold 20000 messages and parts: give at most 10000"),
        ("/detokenize", {"tokens": ["a"] * MANY}, "tokens[0]"),
    ],
)
async def test_the_first_fault_is_enough(client, monkeypatch, path, body, words):
    """Not an error object for each of a million entries."""
    counts = []
    known = errors.from_validation
    monkeypatch.setattr(errors, "from_validation", lambda error: counts.append(len(error.errors())) or known(error))
    assert words in (await refused(client, path, body))["message"]
    assert counts == [] or max(counts) <= 5


LONG = "k" * 50_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {LONG: 1, "messages": []}, "k" * 57 + "..."),
        ("/v1/completions", {"prompt": "a", "logit_bias": {LONG: "x"}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {LONG: 1.0}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "temperature": LONG}, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": [LONG] * 100}, "temperature"),
        ("/v1/completions", {"prompt": "a", "model": LONG}, "model"),
        ("/v1/completions", b'{"prompt": "a", "n": ' + b"7" * 4200 + b"}", "n"),
        ("/v1/completions", b'{"prompt": "a", "top_p": [' + b"7" * 4200 + b"]}", "top_p"),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "x"}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {LONG: 1}},
            None,
        ),
    ],
)
async def test_what_is_huge_is_not_echoed(client, engine, path, body, param):
    if param is None:
        assert (await client.post(path, json=body)).status_code == 200
        return
    error = await refused(client, path, body, 404 if param == "model" else 400)
    assert error["param"] == param and "k" * 200 not in error["message"]


async def test_a_huge_path_is_not_echoed(client):
    response = await client.get("/" + "x" * 50_000)
    assert response.status_code == 404 and len(response.content) < 2000


@pytest.mark.parametrize("name", ["self", "messages", "add_generation_prompt"])
async def test_template_arguments_that_are_not_the_client_s(client, name):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}}
    error = await refused(client, "/v1/chat/completions", body)
    assert error["param"] == "chat_template_kwargs" and repr(name) in error["message"]


def test_prompts_are_what_they_were():
    for prompt in ("", "a", [], [1, 2], ["a", ""], [[1], [2**31 - 1]], [[]]):
        assert CompletionRequest(prompt=prompt).prompt == prompt
    schema = CompletionRequest.model_json_schema()["properties"]["prompt"]
    assert len(schema["anyOf"]) == 4
