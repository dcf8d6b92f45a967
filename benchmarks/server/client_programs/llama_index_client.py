"""llama-index: OpenAILike, its class for OpenAI-compatible servers."""

from typing import Literal

import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from outcomes import BASE, MODEL, check, check_weather, feature, main

model = OpenAILike(
    model=MODEL,
    api_base=BASE,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=2048,
    max_tokens=64,
    max_retries=0,
    timeout=120,
)
ASK = [ChatMessage(role="user", content="Name three colours.")]


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    bright: bool


def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Weather of a city."""
    return f"Sunny in {city} for {days} days."


@feature("chat")
def chat():
    check(model.chat(ASK).message.content)


@feature("streamed chat")
def stream():
    check("".join(piece.delta or "" for piece in model.stream_chat(ASK)))


@feature("text completions")
def completions():
    plain = OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=False, max_tokens=4, max_retries=0)
    check(plain.complete("The sea is").text and "".join(each.delta for each in plain.stream_complete("The sea is")))


@feature("structured output")
def structured():
    check(isinstance(model.as_structured_llm(Colour).chat(ASK).raw, Colour))


@feature("tools")
def tools():
    offered = [FunctionTool.from_defaults(weather)]
    answer = model.chat_with_tools(offered, user_msg="Weather in Rome?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)[:1]
    check_weather(call.tool_kwargs)
    check(offered[0].call(**call.tool_kwargs).content.startswith("Sunny"))


@feature("streamed tools")
def streamed_tools():
    offered = [FunctionTool.from_defaults(weather)]
    *_, last = model.stream_chat_with_tools(offered, user_msg="Weather in Rome?", tool_required=True)
    check_weather(model.get_tool_calls_from_response(last)[0].tool_kwargs)


main()
