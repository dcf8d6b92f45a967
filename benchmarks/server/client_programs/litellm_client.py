"""litellm, by its provider for OpenAI-compatible servers."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pydantic
from outcomes import BASE, HELLO, MODEL, WEATHER, check, check_weather, feature, main, served

ASKED = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": "none", "num_retries": 0, "timeout": 120}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": WEATHER}}


class Colour(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    bright: bool


@feature("chat")
def chat():
    answer = litellm.completion(messages=HELLO, max_tokens=12, temperature=0, **ASKED)
    check(answer.choices[0].message.content and answer.usage.completion_tokens == 12, answer)


@feature("streamed chat")
def stream():
    pieces = list(litellm.completion(messages=HELLO, max_tokens=12, stream=True, **ASKED))
    check("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))


@feature("text completions")
def completions():
    asked = {**ASKED, "model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(prompt="The sea is", max_tokens=4, **asked)
    check(answer.choices[0].text, answer)


@feature("structured output")
def structured():
    answer = litellm.completion(messages=HELLO, response_format=Colour, **ASKED)
    Colour.model_validate_json(answer.choices[0].message.content)


@feature("tools")
def tools():
    answer = litellm.completion(messages=HELLO, tools=[TOOL], tool_choice="required", **ASKED)
    check_weather(answer.choices[0].message.tool_calls[0].function.arguments)


@feature("streamed tools")
def streamed_tools():
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(litellm.completion(messages=HELLO, tools=[TOOL], tool_choice=named, stream=True, **ASKED))
    whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
    check_weather(whole.choices[0].message.tool_calls[0].function.arguments)


@feature("responses")
def responses():
    answer = litellm.responses(input="Name a colour.", max_output_tokens=16, **ASKED)
    check(answer.output, answer)


@feature("embeddings")
def embeddings():
    served("/v1/embeddings")
    found = litellm.embedding(input=["The sea is blue.", "Two."], encoding_format="float", **ASKED)
    check(len(found.data) == 2 and len(found.data[0]["embedding"]) > 8)


@feature("context overflow")
def overflow():
    try:
        litellm.completion(messages=[{"role": "user", "content": "sea " * 9000}], **ASKED)
    except litellm.ContextWindowExceededError:
        return
    check(False, "it was accepted")


main()
