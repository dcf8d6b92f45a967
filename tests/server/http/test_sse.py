"""Events cut from a template are the events that the models themselves would write."""

import json

import pytest

from transect.server.http.sse import PLACE, TextEvents, event
from transect.server.openai.replies import ChatChunk, ChunkChoice, CompletionChoice, CompletionResponse, Delta

TEXTS = [" plain", 'quotes " and \\ and \n\t\x00', "wörter 🙂 \u2028", PLACE, ""]
NAME = f'a model called "{PLACE}"'


def completion(text):
    return CompletionResponse(id="cmpl-1", created=7, model=NAME, choices=[CompletionChoice(index=3, text=text)])


def chat(text):
    return ChatChunk(id="c-1", created=7, model=NAME, choices=[ChunkChoice(index=3, delta=Delta(content=text))])


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("text", TEXTS)
def test_any_text(make, text):
    data = TextEvents(make(PLACE)).event(text)
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and b"\n" not in data[:-2]
    assert json.loads(data[6:]) == json.loads(event(make(text))[6:]) == make(text).model_dump()
