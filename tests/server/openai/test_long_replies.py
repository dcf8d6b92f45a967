"""Long answers are made little by little, and are what they would be in one go."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from transect.server.openai import long_replies
from transect.server.openai.logprobs import chat_logprobs, completion_logprobs
from transect.server.openai.long_replies import all_chat_logprobs, all_completion_logprobs, json_of
from transect.server.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    ModelList,
    PromptDetails,
    Usage,
)

NASTY = 'a"logprobs":null,"choices":[]\\"choices":[] \\"logprobs\\":null \n\u00e9\U0001f600'
USAGE = Usage(
    prompt_tokens=1, completion_tokens=2, total_tokens=3, prompt_tokens_details=PromptDetails(cached_tokens=0)
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
PROMPT = {"prompt": "Hi there", "logprobs": 2, "max_tokens": 50, "echo": True}


class Tokenizer:
    def token_text(self, token):
        return NASTY[token % len(NASTY)]

    def token_bytes(self, token):
        return self.token_text(token).encode()


def positions(count):
    entry = lambda value: SimpleNamespace(logprob=value, rank=1, decoded_token=None)  # noqa: E731
    return [
        {index: entry(-0.1 * index), index + 1: entry(float("-inf")), index + 2: entry(-1e-9)} for index in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 64, 150])
async def test_a_chat_is_the_same_in_pieces(count):
    found, ids, tokenizer = positions(count), list(range(count)), Tokenizer()
    logprobs = await all_chat_logprobs(found, ids, 2, tokenizer)
    assert logprobs == chat_logprobs(found, ids, 2, tokenizer)
    message = AssistantMessage(content=NASTY)
    choices = [
        ChatChoice(index=0, message=message, logprobs=logprobs, finish_reason="stop", stop_reason=NASTY),
        ChatChoice(index=1, message=message, finish_reason="length"),
    ]
    reply = ChatResponse(id="x", created=1, model=NASTY, choices=choices, usage=USAGE)
    assert await json_of(reply) == reply.model_dump_json().encode()


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("count", [1, 64, 150])
async def test_a_completion_is_the_same_in_pieces(count, top):
    found, ids, tokenizer = [None, *positions(count)[1:]], list(range(count)), Tokenizer()
    logprobs = await all_completion_logprobs(found, ids, top, tokenizer)
    assert logprobs == completion_logprobs(found, ids, top, tokenizer)
    choices = [CompletionChoice(index=0, text=NASTY, logprobs=logprobs, finish_reason="stop")]
    for usage in (None, USAGE):
        reply = CompletionResponse(id="x", created=1, model=NASTY, choices=choices, usage=usage)
        assert await json_of(reply) == reply.model_dump_json().encode()


async def test_other_replies():
    assert await json_of(ModelList(data=[])) == b'{"object":"list","data":[]}'


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)])
async def test_others_have_their_turns(client, engine, monkeypatch, path, body):
    """While one answer is made, a task that only counts gets ahead at least once for each of its pieces, twice."""
    turns, engine.reply = 0, "abc" * 40

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def noted(make):
        async def noting(*args):
            before = turns
            made = await make(*args)
            seen.append(turns - before)
            return made

        return noting

    seen = []
    monkeypatch.setattr(long_replies, "PIECE", 4)
    for module, name in (
        ("openai.chat", "all_chat_logprobs"),
        ("openai.completions", "all_completion_logprobs"),
        ("app", "json_of"),
    ):
        monkeypatch.setattr(f"transect.server.{module}.{name}", noted(getattr(long_replies, name)))
    counting = asyncio.create_task(count())
    response = await client.post(path, json=body)
    counting.cancel()
    assert response.status_code == 200 and json.loads(response.content)["choices"][0]["logprobs"]
    assert len(seen) == 2 and min(seen) >= 10
