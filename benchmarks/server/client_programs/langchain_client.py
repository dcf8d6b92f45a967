"""langchain-openai: ChatOpenAI, OpenAI, OpenAIEmbeddings, and an agent's loop of calls."""

from typing import Literal

import openai
import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from outcomes import BASE, MODEL, check, check_weather, feature, main, served

ASKED = {"model": MODEL, "base_url": BASE, "api_key": "none", "max_retries": 0, "timeout": 120}
chat_model = ChatOpenAI(**ASKED)


class Colour(pydantic.BaseModel):
    """A colour."""

    name: str = pydantic.Field(max_length=8)
    bright: bool


@tool
def weather(city: Literal["Oslo", "Rome"], days: int = pydantic.Field(ge=1, le=9)) -> str:
    """Weather of a city."""
    return f"Sunny in {city} for {days} days."


@feature("chat")
def chat():
    answer = chat_model.invoke("Name three colours.", max_tokens=12)
    check(answer.content and 0 < answer.usage_metadata["output_tokens"] <= 12, answer)


@feature("streamed chat")
def stream():
    pieces = list(chat_model.stream("Name three colours.", max_tokens=12, stream_usage=True))
    check("".join(piece.content for piece in pieces) and any(piece.usage_metadata for piece in pieces), pieces)


@feature("text completions")
def completions():
    check(OpenAI(**ASKED, max_tokens=4).invoke("The sea is"))


@feature("structured output")
def structured():
    for method in ("json_schema", "function_calling"):
        found = chat_model.with_structured_output(Colour, method=method).invoke("Name a colour.")
        check(isinstance(found, Colour), (method, found))


@feature("tools")
def tools():
    question = HumanMessage("Weather in Rome?")
    answer = chat_model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke([question])
    check_weather({"days": 1, **answer.tool_calls[0]["args"]})
    result = weather.invoke(answer.tool_calls[0])
    check(isinstance(result, ToolMessage))
    check(chat_model.bind_tools([weather]).invoke([question, answer, result], max_tokens=8))


@feature("streamed tools")
def streamed_tools():
    whole = None
    for piece in chat_model.bind_tools([weather], tool_choice="weather").stream("Weather in Rome?"):
        whole = piece if whole is None else whole + piece
    check_weather({"days": 1, **whole.tool_calls[0]["args"]})


@feature("responses")
def responses():
    answer = ChatOpenAI(**ASKED, use_responses_api=True, max_tokens=16).invoke("Name a colour.")
    check(answer.text, answer)


@feature("embeddings")
def embeddings():
    served("/v1/embeddings")
    found = OpenAIEmbeddings(**ASKED, check_embedding_ctx_length=False).embed_documents(["The sea is blue.", "Two."])
    check(len(found) == 2 and len(found[0]) > 8)


@feature("context overflow")
def overflow():
    try:
        chat_model.invoke("sea " * 9000)
    except openai.BadRequestError as error:
        check(error.code == "context_length_exceeded", error)
        return f"{type(error).__name__}"
    check(False, "it was accepted")


main()
