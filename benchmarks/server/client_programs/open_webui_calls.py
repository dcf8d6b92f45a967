"""The HTTP calls that Open WebUI makes to an OpenAI-compatible connection, after a copy of its source.

Read in its sources (routers/openai.py, retrieval/utils.py): the list of models for a connection; a chat, streamed with
its usage, with a marker for caches on the last message and a user's headers; titles and tags of a chat, not streamed;
native tools; embeddings of documents in batches.
"""

import json

from outcomes import HELLO, MODEL, WEATHER, call, check, check_weather, events, feature, main, served

HEADERS = {
    "Authorization": "Bearer none",
    "X-OpenWebUI-User-Name": "Ann%20User",
    "X-OpenWebUI-User-Id": "5e9f",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "c1",
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": WEATHER}}
PARTS = [{"type": "text", "text": "Name three colours.", "cache_control": {"type": "ephemeral"}}]
STREAMED = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}


@feature("models")
def models():
    found = call("GET", "/models", headers=HEADERS)
    check(found["object"] == "list" and MODEL in [each["id"] for each in found["data"]], found)


@feature("chat")
def titles():
    prompt = [{"role": "user", "content": '### Task:\nGenerate a concise title.\nJSON format: { "title": "..." }'}]
    fields = {"model": MODEL, "messages": prompt, "stream": False, "max_completion_tokens": 32}
    check(call("POST", "/chat/completions", fields, HEADERS)["choices"][0]["message"]["content"])


@feature("streamed chat")
def stream():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
    fields = {**STREAMED, "messages": messages, "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "top_k": 40}
    found = events("/chat/completions", fields, HEADERS)
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in found if each["choices"])
    check(text and found[-1]["usage"]["total_tokens"] > 12, found[-1])


@feature("tools")
def tools():
    fields = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "stream": False}
    message = call("POST", "/chat/completions", fields, HEADERS)["choices"][0]["message"]
    check_weather(message["tool_calls"][0]["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny."}
    said = {"role": "assistant", "content": message.get("content") or "", "tool_calls": message["tool_calls"]}
    more = {"model": MODEL, "messages": [*HELLO, said, result], "tools": [TOOL], "max_tokens": 8}
    check(call("POST", "/chat/completions", more, HEADERS)["choices"])


@feature("streamed tools")
def streamed_tools():
    fields = {**STREAMED, "messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    calls = [
        delta
        for each in events("/chat/completions", fields, HEADERS)
        for choice in each["choices"]
        for delta in choice["delta"].get("tool_calls") or ()
        if delta["index"] == 0
    ]
    check_weather("".join(each["function"].get("arguments") or "" for each in calls))
    return json.dumps(calls[0]["function"])


@feature("embeddings")
def embeddings():
    served("/v1/embeddings")
    found = call("POST", "/embeddings", {"input": ["The sea is blue."] * 3, "model": MODEL}, HEADERS)
    check(len(found["data"]) == 3 and len(found["data"][0]["embedding"]) > 8)


main()
