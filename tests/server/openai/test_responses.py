"""``/v1/responses`` on the fake engine: log-probabilities, truncation, and refusals in the conversation."""

import json

import pytest

from transect.server.openai.protocol import ChatMessage


async def events(client, body):
    response = await client.post("/v1/responses", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("asked", [{"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}])
async def test_log_probabilities_of_the_text(client, engine, asked):
    body = {"input": "Hi", "max_output_tokens": 5, **asked}
    whole = (await client.post("/v1/responses", json=body)).json()
    (part,) = whole["output"][0]["content"]
    entries = part["logprobs"]
    assert [entry["token"] for entry in entries] == list(engine.reply[:5]) and part["text"] == engine.reply[:5]
    tops = [len(entry["top_logprobs"]) for entry in entries]
    assert tops == [asked.get("top_logprobs", 0)] * 5 and all(entry["logprob"] == -0.5 for entry in entries)
    assert whole["top_logprobs"] == asked.get("top_logprobs", 0)
    seen = await events(client, body)
    deltas = [each for each in seen if each["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each["logprobs"]] == entries
    (done,) = [each for each in seen if each["type"] == "response.output_text.done"]
    assert done["logprobs"] == entries and seen[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


async def test_without_being_asked_there_are_none(client, engine):
    whole = (await client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 3})).json()
    assert whole["output"][0]["content"][0]["logprobs"] == [] and engine.seen[-1][1].logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_tool_calls": 4}, "max_tool_calls"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"efort": "low"}}, "reasoning"),
        ({"background": True}, "background"),
    ],
)
async def test_fields_that_are_wrong(client, fields, param):
    response = await client.post("/v1/responses", json={"input": "Hi", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def turn(number):
    return [{"role": "user", "content": f"question {number} " + "x" * 20}, {"role": "assistant", "content": "answer"}]


async def test_truncation_drops_the_oldest_turns_and_keeps_the_system(client, engine):
    items = [{"role": "system", "content": "be kind"}, *(item for number in range(12) for item in turn(number))]
    body = {"input": [*items, {"role": "user", "content": "last"}], "max_output_tokens": 3}
    refused = await client.post("/v1/responses", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    seen = []
    stream = engine.stream

    def watched(token_ids, *arguments, **options):
        seen.append(bytes(token_ids).decode())
        return stream(token_ids, *arguments, **options)

    engine.stream = watched
    made = await client.post("/v1/responses", json={**body, "truncation": "auto"})
    assert made.status_code == 200, made.text
    assert made.json()["truncation"] == "auto"
    (prompt,) = seen
    assert prompt.startswith("[system]be kind[user]question ") and prompt.endswith("[user]last[a]")
    assert len(prompt) < engine.max_model_len <= len(prompt) + len("[user]question 9 [assistant]answer") + 20
    short = await client.post("/v1/responses", json={**body, "input": "Hi", "truncation": "auto"})
    assert short.status_code == 200
    long = await client.post("/v1/responses", json={"input": "x" * 900, "truncation": "auto"})
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"


async def test_an_empty_bound_on_calls_is_no_bound(client):
    made = await client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2, "max_tool_calls": None})
    assert made.status_code == 200 and made.json()["max_tool_calls"] is None


REFUSED = [{"type": "refusal", "refusal": "I will not."}]


async def test_refusals_in_the_conversation_are_what_the_assistant_said(client, engine):
    items = [
        {"role": "user", "content": "Do it"},
        {"type": "message", "role": "assistant", "content": REFUSED},
        {"role": "user", "content": "Why?"},
    ]
    assert (await client.post("/v1/responses", json={"input": items, "max_output_tokens": 2})).status_code == 200
    for answer in ({"content": None, "refusal": "I will not."}, {"content": REFUSED}):
        messages = [items[0], {"role": "assistant", **answer}, items[2]]
        body = {"messages": messages, "return_token_strs": True}
        reply = (await client.post("/tokenize", json=body)).json()
        assert "".join(reply["token_strs"]) == "[user]Do it[assistant]I will not.[user]Why?[a]"
    wrong = [{"role": "user", "content": REFUSED}]
    assert (await client.post("/v1/chat/completions", json={"messages": wrong})).status_code == 400
    assert ChatMessage(role="assistant", content="a", refusal=None).plain() == {"role": "assistant", "content": "a"}
