"""Shapes of answers and streams, on the fake engine."""

import asyncio
import dataclasses
import json
import os
import re

import httpx
import pytest

from transect.server.app import create_app
from transect.text.sampling_defaults import SamplingDefaults

CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "fake-model", "prompt": "Hi", "max_tokens": 100}
REPLY = "Hello, wörld. END of it"


async def events(client, path, body):
    """The JSON of each event of a stream, after checking how it ends."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        text = (await response.aread()).decode()
    assert response.status_code == 200, text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


async def test_chat_answer(client):
    response = await client.post("/v1/chat/completions", json=CHAT)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion" and body["model"] == "fake-model"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert choice["finish_reason"] == "length"
    prompt, completion = len("[user]Hi[a]"), len(REPLY.encode())
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_chat_stream_has_one_role_one_finish_and_the_same_text(client):
    chunks = await events(client, "/v1/chat/completions", {**CHAT, "n": 3, "stream_options": {"include_usage": True}})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3 * len(REPLY.encode())
    for index in range(3):
        choices = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert [("role" in each["delta"]) for each in choices] == [True] + [False] * (len(choices) - 1)
        assert "".join(each["delta"].get("content", "") for each in choices) == REPLY
        assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + ["length"]
        assert choices[-1]["delta"] == {}


async def test_usage_chunk_only_on_request(client):
    chunks = await events(client, "/v1/chat/completions", CHAT)
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_chunks_is_cut_and_reported(client, stream):
    body = {**CHAT, "stop": [" END", "never"]}
    if stream:
        choices = [each for chunk in await events(client, "/v1/chat/completions", body) for each in chunk["choices"]]
        text, end = "".join(each["delta"].get("content", "") for each in choices), choices[-1]
    else:
        (end,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        text = end["message"]["content"]
    assert text == "Hello, wörld."
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", " END")


async def test_completion_of_several_prompts_counts_choices_through(client):
    body = {**PROMPT, "prompt": ["a", "bc"], "n": 2, "max_tokens": 5}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["object"] == "text_completion"
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    assert {each["text"] for each in answer["choices"]} == {"Hello"}
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 20
    chunks = await events(client, "/v1/completions", body)
    for index in range(4):
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(each["text"] for each in mine) == "Hello"
        assert [each["finish_reason"] for each in mine][-1] == "length"
        assert sum(each["finish_reason"] is not None for each in mine) == 1


@pytest.mark.parametrize("prompt", ["Hi", [72, 105], ["Hi"], [[72, 105]]])
async def test_forms_of_prompt(client, prompt):
    answer = (await client.post("/v1/completions", json={**PROMPT, "prompt": prompt, "echo": True})).json()
    assert answer["choices"][0]["text"] == "Hi" + REPLY
    chunks = await events(client, "/v1/completions", {**PROMPT, "prompt": prompt, "echo": True})
    assert "".join(each["text"] for chunk in chunks for each in chunk["choices"]) == "Hi" + REPLY


async def test_completions_default_is_sixteen_tokens(client, engine):
    await client.post("/v1/completions", json={"prompt": "Hi"})
    assert engine.seen[-1][1].max_tokens == 16
    await client.post("/v1/chat/completions", json={"messages": CHAT["messages"]})
    assert engine.seen[-1][1].max_tokens is None


async def test_echo_with_no_tokens_scores_the_prompt(client):
    body = {**PROMPT, "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = (await client.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 0


async def test_chat_logprobs_streamed_and_whole_agree(client):
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
    first = whole[0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("H", -0.5, [72])
    # JSON has no -inf.
    assert [(each["token"], each["logprob"]) for each in first["top_logprobs"]] == [("H", -0.5), ("A", -9999.0)]
    chunks = await events(client, "/v1/chat/completions", body)
    pieces = [each["logprobs"] for chunk in chunks for each in chunk["choices"] if each["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == whole


async def test_sampling_fields_arrive(client, engine):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
    }
    fields |= {
        "ignore_eos": True,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "stop_token_ids": [3],
        "n": 2,
        "min_tokens": 2,
    }
    body = {**CHAT, **fields, "priority": -3, "logit_bias": {"65": 5}, "max_completion_tokens": 9, "stop": "x"}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    _, params, priority = engine.seen[-1]
    assert priority == -3 and params.logit_bias == {65: 5.0} and params.max_tokens == 9 and params.stop == ("x",)
    fields["stop_token_ids"] = (3,)
    assert {name: getattr(params, name) for name in fields} == fields


async def test_harmless_openai_fields_are_ignored(client):
    extra = {"user": "me", "metadata": {"a": "b"}, "store": True, "tools": [], "response_format": {"type": "text"}}
    extra |= {"service_tier": "auto", "safety_identifier": "x", "parallel_tool_calls": False, "tool_choice": "none"}
    assert (await client.post("/v1/chat/completions", json={**CHAT, **extra})).status_code == 200


async def test_history_from_an_openai_client_is_accepted(client):
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, answer, CHAT["messages"][0]]
    body = {"messages": messages}
    text = (await client.post("/tokenize", json=body)).json()
    back = (await client.post("/detokenize", json={"tokens": text["tokens"]})).json()["prompt"]
    assert back == "[system]s[user]a\nb[assistant]x[user]Hi[a]"


async def test_models_and_tokenizer_routes(client):
    listed = (await client.get("/v1/models")).json()
    assert [each["id"] for each in listed["data"]] == ["fake-model", "alias"]
    assert (await client.get("/v1/models/alias")).json()["max_model_len"] == 200
    assert (await client.get("/v1/models/nope")).status_code == 404
    tokens = (await client.post("/tokenize", json={"prompt": "Hé"})).json()
    assert tokens == {"count": 3, "max_model_len": 200, "tokens": [72, 195, 169], "token_strs": None}


async def test_health_says_ok_hung_dead_draining(client, engine, app):
    assert (await client.get("/health")).json() == {
        "state": "ok",
        "detail": None,
        "in_flight": 0,
        "server_pid": os.getpid(),
        "engine_pids": [4242],
    }
    app.state.serving.draining = True
    response = await client.get("/health")
    assert (response.status_code, response.json()["state"]) == (503, "draining")
    for state in ("hung", "dead"):
        engine.state = state
        response = await client.get("/health")
        assert (response.status_code, response.json()["state"]) == (503, state)


def metric_lines(text):
    """The metrics without the label that all have."""
    lines = [re.sub(r',?model_name="fake-model"', "", line).replace("{,", "{") for line in text.splitlines()]
    return [line.replace("{}", "") for line in lines]


async def test_metrics(client, engine):
    await client.post("/v1/completions", json={**PROMPT, "max_tokens": 3, "n": 2})
    await client.post("/v1/completions", json={**PROMPT, "stop": "wör"})
    await client.get("/no-such-route")
    text = (await client.get("/metrics")).text
    lines = metric_lines(text)
    for line in (
        "transect_engine_up 1.0",
        "transect_requests_waiting 1.0",
        "transect_kv_cache_usage_ratio 0.5",
        "transect_prefix_cache_hit_ratio 0.25",
        "transect_preemptions_total 3.0",
        "transect_step_seconds_total 0.5",
        "transect_predicted_step_seconds_total 0.6",
        "transect_step_time_ratio 1.0",
        'transect_alarm{name="StepTimeDrift"} 0.0',
        "transect_grammar_cache_bytes 0.0",
        "transect_draft_tokens_total 9.0",
        "transect_accepted_tokens_total 6.0",
        'transect_accepted_tokens_per_position_total{position="1"} 2.0',
        "transect_late_captures_total 0.0",
        "transect_late_compilations_total 0.0",
        "transect_prompt_tokens_total 4.0",
        'transect_choices_finished_total{finish_reason="length"} 2.0',
        'transect_choices_finished_total{finish_reason="stop"} 1.0',
        "transect_time_to_first_token_seconds_count 2.0",
        "transect_request_latency_seconds_count 2.0",
        'transect_http_responses_total{route="/v1/completions",status="200"} 2.0',
        'transect_http_responses_total{route="other",status="404"} 1.0',
    ):
        assert line in lines
    # 3 tokens of 2 choices make 2 * 2 gaps; the second request stops at the 4th byte of "wör", the 11th of the reply.
    assert "transect_inter_token_latency_seconds_count 14.0" in lines
    assert "transect_generation_tokens_total 17.0" in lines
    # the same for vLLM's boards, and what only they show
    for line in (
        'vllm:num_requests_waiting{engine="0"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.5',
        'vllm:generation_tokens_total{engine="0"} 17.0',
        'vllm:request_success_total{engine="0",finished_reason="length"} 2.0',
        'vllm:time_to_first_token_seconds_count{engine="0"} 2.0',
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} 14.0',
        'vllm:request_prompt_tokens_sum{engine="0"} 4.0',
        'vllm:request_generation_tokens_sum{engine="0"} 17.0',
        'vllm:request_max_num_generation_tokens_sum{engine="0"} 14.0',
        'vllm:request_queue_time_seconds_count{engine="0"} 2.0',
        'vllm:request_prefill_time_seconds_sum{engine="0"} 4.0',
        'vllm:request_decode_time_seconds_count{engine="0"} 2.0',
        'vllm:request_inference_time_seconds_count{engine="0"} 2.0',
        'vllm:request_time_per_output_token_seconds_count{engine="0"} 2.0',
        'vllm:request_params_n_sum{engine="0"} 3.0',
        'vllm:request_params_max_tokens_sum{engine="0"} 103.0',
    ):
        assert line in lines, line
    assert all('model_name="fake-model"' in line for line in text.splitlines() if not line.startswith("#"))


async def test_metrics_of_a_hung_engine_are_the_last_known(client, engine, monkeypatch):
    await client.get("/metrics")
    engine.state = "hung"
    monkeypatch.setattr("transect.server.operations.health.PROBE_S", 0.01)
    lines = metric_lines((await client.get("/metrics")).text)
    assert "transect_engine_up 0.0" in lines and "transect_kv_blocks 10.0" in lines


async def test_many_at_once_do_not_mix(client, engine):
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json={**PROMPT, "max_tokens": 1 + each % 8}) for each in range(40))
    )
    assert [each.json()["choices"][0]["text"] for each in answers] == [REPLY[: 1 + each % 8] for each in range(40)]
    assert not engine.running


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "a"}, (True, True)),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": False, "parse_special": False}, (False, False)),
        ("/tokenize", {"prompt": "a"}, (True, True)),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, (False, True)),
        ("/tokenize", {"prompt": "a", "parse_special": False}, (True, False)),
    ],
)
async def test_how_text_is_encoded_is_the_client_s_to_say(client, engine, path, body, expected):
    seen = []
    plain = engine.tokenizer.encode

    def encode(text, add_special_tokens=False, parse_special=False):
        seen.append((add_special_tokens, parse_special))
        return plain(text)

    engine.tokenizer.encode = encode
    answer = await client.post(path, json={"model": "fake-model", **body})
    assert answer.status_code == 200 and seen == [expected]


async def test_tokenize_gives_the_texts_of_tokens(client):
    answer = await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["a", "b"]


async def test_sampling_defaults_of_the_model_and_what_goes_over_them(client, engine):
    engine.sampling_defaults = SamplingDefaults({"temperature": 0.6, "top_k": 20}, max_new_tokens=5)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    text = {"prompt": "x"}
    for path, body, expected in (
        ("/v1/chat/completions", chat, (0.6, 20, 5)),
        ("/v1/chat/completions", {**chat, "temperature": 1, "top_k": 3, "max_tokens": 4}, (1, 3, 4)),
        ("/v1/completions", text, (0.6, 20, 5)),
        ("/v1/completions", {**text, "max_tokens": 50}, (0.6, 20, 5)),
    ):
        assert (await client.post(path, json=body)).status_code == 200
        _, params, _ = engine.seen.pop()
        assert (params.temperature, params.top_k, params.max_tokens) == expected


async def test_web_pages_of_other_origins(engine, options):
    asked = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    options = dataclasses.replace(options, api_keys=("secret",))
    for origins, allowed in ((("*",), "*"), (("http://page",), "http://page"), (("http://other",), None), ((), None)):
        app = create_app(engine, dataclasses.replace(options, allowed_origins=origins))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            before = await client.options("/v1/chat/completions", headers=asked)
            assert before.headers.get("access-control-allow-origin") == allowed
            assert (before.status_code == 200) == (allowed is not None)
            headers = {"Origin": "http://page", "Authorization": "Bearer secret"}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200 and answer.headers.get("access-control-allow-origin") == allowed
            refused = await client.post("/v1/chat/completions", json=CHAT, headers={"Origin": "http://page"})
            assert refused.status_code == 401 and refused.headers.get("access-control-allow-origin") == allowed
