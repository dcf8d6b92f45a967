"""OpenAI's agents SDK (openai-agents), over chat completions and over the Responses API."""

import asyncio

import agents
import openai
import pydantic
from outcomes import BASE, MODEL, check, feature, main

agents.set_tracing_disabled(True)
LOOP = asyncio.new_event_loop()
"""One for all: the client keeps its connections."""
client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120)
CHAT = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
RESPONSES = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
SHORT = agents.ModelSettings(max_tokens=16, temperature=0)
FORCED = agents.ModelSettings(max_tokens=64, temperature=0, tool_choice="required")


class Colour(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    bright: bool


def agent(model, **fields):
    return agents.Agent(name="helper", instructions="Be brief.", model=model, **fields)


def run(asked):
    return LOOP.run_until_complete(agents.Runner.run(asked, "Name three colours.", max_turns=3))


async def text_of(result):
    pieces = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    return "".join(pieces)


def with_tool(model):
    """An agent that must call its tool, after which the SDK lets it answer."""
    seen = []

    @agents.function_tool
    def weather(days: int) -> str:
        """Weather of the coming days."""
        seen.append(days)
        return "Sunny."

    return seen, agent(model, model_settings=FORCED, tools=[weather])


@feature("chat")
def chat():
    check(run(agent(CHAT, model_settings=SHORT)).final_output)


@feature("streamed chat")
def stream():
    async def ask():
        result = agents.Runner.run_streamed(agent(CHAT, model_settings=SHORT), "Name three colours.")
        return await text_of(result), result.final_output

    text, final = LOOP.run_until_complete(ask())
    check(text and text == final, (text, final))


@feature("structured output")
def structured():
    for model in (CHAT, RESPONSES):
        check(isinstance(run(agent(model, output_type=Colour)).final_output, Colour))


@feature("tools")
def tools():
    seen, asked = with_tool(CHAT)
    check(run(asked).final_output is not None and seen, seen)


@feature("streamed tools")
def streamed_tools():
    async def ask():
        seen, asked = with_tool(CHAT)
        await text_of(agents.Runner.run_streamed(asked, "Weather of three days?", max_turns=3))
        return seen

    seen = LOOP.run_until_complete(ask())
    check(seen, seen)


@feature("responses")
def responses():
    check(run(agent(RESPONSES, model_settings=SHORT)).final_output)
    seen, asked = with_tool(RESPONSES)
    check(run(asked).final_output is not None and seen, seen)


main()
