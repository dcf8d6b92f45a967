"""pydantic-ai: agents with outputs of a class, by response format and by tool."""

import asyncio
from typing import Literal

import pydantic
from outcomes import BASE, MODEL, check, feature, main
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE, api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"max_tokens": 64, "temperature": 0.0}


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    bright: bool


@feature("chat")
def chat():
    found = Agent(model, model_settings=SETTINGS, instructions="Be brief.").run_sync("Name three colours.")
    check(found.output and found.usage.output_tokens, found)


@feature("streamed chat")
def stream():
    async def run():
        async with Agent(model, model_settings=SETTINGS).run_stream("Name three colours.") as found:
            return [piece async for piece in found.stream_text(delta=True)]

    check("".join(asyncio.run(run())))


@feature("structured output")
def structured():
    found = Agent(model, output_type=NativeOutput(Colour), model_settings=SETTINGS).run_sync("Name a colour.")
    check(isinstance(found.output, Colour))


@feature("tools")
def tools():
    found = Agent(model, output_type=ToolOutput(Colour), model_settings=SETTINGS).run_sync("Name a colour.")
    check(isinstance(found.output, Colour))


@feature("streamed tools")
def streamed_tools():
    async def run():
        agent = Agent(model, output_type=ToolOutput(Colour), model_settings=SETTINGS)
        async with agent.run_stream("Name a colour.") as found:
            return await found.get_output()

    check(isinstance(asyncio.run(run()), Colour))


@feature("responses")
def responses():
    newer = OpenAIResponsesModel(MODEL, provider=provider)
    found = Agent(newer, output_type=NativeOutput(Colour), model_settings=SETTINGS).run_sync("Name a colour.")
    check(isinstance(found.output, Colour))


main()
