"""instructor: classes out of answers, in its modes of tools and of JSON."""

from typing import Literal

import instructor
import openai
import pydantic
from outcomes import BASE, HELLO, MODEL, check, feature, main

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120)
ASKED = {"model": MODEL, "messages": HELLO, "max_retries": 0}


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    bright: bool


def of(mode):
    return instructor.from_openai(client, mode=mode)


@feature("structured output")
def schema():
    check(isinstance(of(instructor.Mode.JSON_SCHEMA).create(response_model=Colour, **ASKED), Colour))
    return "Mode.JSON_SCHEMA"


@feature("streamed chat")
def partial():
    pieces = list(of(instructor.Mode.JSON_SCHEMA).create_partial(response_model=Colour, **ASKED))
    check(pieces[-1].name in ("red", "green", "blue") and isinstance(pieces[-1].bright, bool), pieces)
    return "create_partial"


@feature("tools")
def tools():
    check(isinstance(of(instructor.Mode.TOOLS).create(response_model=Colour, **ASKED), Colour))
    check(isinstance(of(instructor.Mode.TOOLS_STRICT).create(response_model=Colour, **ASKED), Colour))


@feature("streamed tools")
def streamed_tools():
    pieces = list(of(instructor.Mode.TOOLS).create_partial(response_model=Colour, **ASKED))
    check(pieces[-1].name in ("red", "green", "blue"), pieces)


main()
