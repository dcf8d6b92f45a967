"""The HTTP calls that LibreChat makes to a custom endpoint, after its documentation; its code was not read.

LibreChat lists models with ``GET /models`` (``models.fetch`` of ``librechat.yaml``), streams chats through LangChain's
client for JavaScript with the conversation's parameters and the user's id, and asks for the title of a conversation as
a tool call or as structured output (``titleMethod``: functions, structured) or as a plain completion.
"""

from outcomes import HELLO, MODEL, WEATHER, call, check, check_weather, events, feature, main

HEADERS = {"Authorization": "Bearer none", "User-Agent": "OpenAI/JS", "X-Stainless-Lang": "js"}
TITLE = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 24}}, "required": ["title"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": WEATHER}}
CHAT = {
    "model": MODEL, "user": "66f0a1", "temperature": 0.7, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "max_tokens": 24, "messages": HELLO,
}  # fmt: skip
STREAMED = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


@feature("models")
def models():
    check(MODEL in [each["id"] for each in call("GET", "/models", headers=HEADERS)["data"]])


@feature("chat")
def chat():
    check(call("POST", "/chat/completions", {**CHAT, "stream": False}, HEADERS)["choices"][0]["message"]["content"])


@feature("streamed chat")
def stream():
    found = events("/chat/completions", STREAMED, HEADERS)
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in found if each["choices"])
    check(text and found[-1]["usage"]["completion_tokens"] > 0, found[-1])


@feature("structured output")
def title():
    schema = {"type": "json_schema", "json_schema": {"name": "title", "schema": TITLE, "strict": True}}
    answer = call("POST", "/chat/completions", {**CHAT, "max_tokens": 64, "response_format": schema}, HEADERS)
    check("title" in answer["choices"][0]["message"]["content"], answer)


@feature("tools")
def tools():
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {**CHAT, "max_tokens": 64, "tools": [TOOL], "tool_choice": named}
    message = call("POST", "/chat/completions", fields, HEADERS)["choices"][0]["message"]
    check_weather(message["tool_calls"][0]["function"]["arguments"])


@feature("streamed tools")
def streamed_tools():
    fields = {**STREAMED, "max_tokens": 64, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    calls = [
        delta["function"].get("arguments") or ""
        for each in events("/chat/completions", fields, HEADERS)
        for choice in each["choices"]
        for delta in choice["delta"].get("tool_calls") or ()
    ]
    check_weather("".join(calls))


main()
