"""Chat answers that continue from given tokens (``continue_token_ids``)."""

import json

import pytest

MESSAGES = [{"role": "user", "content": "hi"}]
URL = "/v1/chat/completions"


def chunks(response):
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in json.loads(event)["choices"]]


@pytest.mark.parametrize("choice", [0, 2])
async def test_an_answer_continues_from_given_tokens(client, engine, choice):
    given = list(engine.reply.encode()[:9])  # ends inside a character
    body = {"messages": MESSAGES, "temperature": 0, "continue_token_ids": given, "continue_choice": choice}
    body |= {"return_token_ids": True, "logprobs": True}
    whole = (await client.post(URL, json=body)).json()
    (found,) = whole["choices"]
    assert found["index"] == choice and found["message"]["content"] == engine.reply
    assert found["token_ids"] == list(engine.reply.encode())
    assert len(found["logprobs"]["content"]) == len(found["token_ids"]) - len(given)
    drawn = len(found["token_ids"]) - len(given)
    assert whole["usage"]["completion_tokens"] == drawn  # the given ones were not drawn
    assert whole["usage"]["prompt_tokens"] == len("[user]hi[a]") + len(given)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks(await client.post(URL, json=body))
    assert {each["index"] for each in streamed} == {choice}
    assert "".join(each["delta"].get("content", "") for each in streamed) == engine.reply
    first = next(each for each in streamed if each["token_ids"])
    assert first["token_ids"] == given and first["logprobs"] is None
    assert [token for each in streamed for token in each["token_ids"] or ()] == list(engine.reply.encode())


@pytest.mark.parametrize("ids", [False, True])
async def test_candidates_have_ids_if_token_ids_are_requested(client, engine, ids):
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "return_token_ids": ids}
    whole = (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]["content"]
    pieces = chunks(await client.post(URL, json=body | {"stream": True}))
    streamed = [entry for each in pieces if each["logprobs"] for entry in each["logprobs"]["content"]]
    assert streamed == whole and len(whole) == len(engine.reply.encode())
    names = {name for entry in whole for each in (entry, *entry["top_logprobs"]) for name in each}
    assert ("token_id" in names) == ids
    if ids:
        assert all(entry["token_id"] == entry["top_logprobs"][0]["token_id"] for entry in whole)
        assert [entry["token_id"] for entry in whole] == list(engine.reply.encode())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2}, "continues one answer"),
        ({"temperature": 1.0}, "needs seed"),
        ({"max_tokens": 2}, "max_tokens counts them"),
        ({"continue_choice": -1}, "continue_choice must be 0"),
        ({"continue_token_ids": [900]}, "this model has ids 0 to 256"),
        ({"continue_token_ids": None, "continue_choice": 1}, "needs continue_token_ids"),
        ({"prompt_logprobs": 1}, "continues one answer"),
    ],
)
async def test_what_does_not_go_together_is_refused(client, more, words):
    body = {"messages": MESSAGES, "temperature": 0, "continue_token_ids": [72, 101]} | more
    response = await client.post(URL, json=body)
    assert response.status_code == 400 and words in response.json()["error"]["message"]
