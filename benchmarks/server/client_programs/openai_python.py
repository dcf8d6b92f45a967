"""The openai package for Python."""

import base64
import struct
from typing import Literal

import openai
import pydantic
from outcomes import BASE, HELLO, MODEL, WEATHER, check, check_weather, feature, main, served

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120)
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": WEATHER}}


class Colour(pydantic.BaseModel):
    name: Literal["red", "green", "blue"]
    bright: bool


@feature("models")
def models():
    check(MODEL in [each.id for each in client.models.list()])


@feature("chat")
def chat():
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0)
    check(answer.choices[0].message.content and answer.usage.completion_tokens == 12, answer)


@feature("streamed chat")
def stream():
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text == whole and chunks[-1].usage.completion_tokens == 12, (text, whole))


@feature("text completions")
def completions():
    answer = client.completions.create(model=MODEL, prompt=["The sea is", "2 + 2 ="], max_tokens=4, logprobs=1)
    check(len(answer.choices) == 2 and len(answer.choices[1].logprobs.tokens) == 4, answer)


@feature("structured output")
def parse():
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Colour)
    check(isinstance(answer.choices[0].message.parsed, Colour), answer)
    with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Colour) as events:
        check(isinstance(events.get_final_completion().choices[0].message.parsed, Colour))


@feature("tools")
def tools():
    asked = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "seed": 1}
    message = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message
    check_weather(message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
    more = client.chat.completions.create(model=MODEL, messages=[*HELLO, message, result], tools=[TOOL], max_tokens=8)
    check(more.choices[0].message, more)


@feature("streamed tools")
def streamed_tools():
    asked = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "seed": 1}
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as events:
        check_weather(events.get_final_completion().choices[0].message.tool_calls[0].function.arguments)


@feature("responses")
def responses():
    parsed = client.responses.parse(model=MODEL, input="Name a colour.", text_format=Colour)
    check(isinstance(parsed.output_parsed, Colour), parsed)
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    asked = {"model": MODEL, "input": "Weather?", "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**asked, parallel_tool_calls=False) as events:
        check_weather(events.get_final_response().output[0].arguments)


@feature("embeddings")
def embeddings():
    served("/v1/embeddings")
    texts = ["The sea is blue.", "Two and two are four."]
    found = client.embeddings.create(model=MODEL, input=texts)  # asks for base64, and decodes it
    check(len(found.data) == 2 and len(found.data[0].embedding) > 8, found.usage)
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=texts[0], encoding_format="base64")
    values = base64.b64decode(raw.http_response.json()["data"][0]["embedding"])
    check(len(struct.unpack(f"<{len(values) // 4}f", values)) == len(found.data[0].embedding))


@feature("context overflow")
def overflow():
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "sea " * 9000}])
    except openai.BadRequestError as error:
        check(error.code == "context_length_exceeded", error)
        return
    check(False, "it was accepted")


main()
