"""When two answers are the same: texts, tokens, log-probabilities, ends and usage; not ids, times or cuts."""

import json

import httpx
import pytest

from transect.bench.same_answers import KINDS, ask


def chunk(text, index=0, reason=None, number=1, **fields):
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    return {"id": f"cmpl-{number}abc", "created": 1700 + number, "choices": [choice], **fields}


def served(*events, done=True):
    body = b": a comment\n\n" + b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    body += b"data: [DONE]\n\n" if done else b""
    return httpx.AsyncClient(
        transport=httpx.MockTransport(lambda request: httpx.Response(200, content=body)), base_url="http://s"
    )


async def got(*events, **options):
    return await ask(served(*events, **options), "/v1/completions", {"stream": True})


USAGE = {"id": "cmpl-9", "created": 4, "choices": [], "usage": {"completion_tokens": 3}}


async def test_ids_times_and_the_cut_into_events_do_not_count():
    one = await got(chunk("a"), chunk("b", 1), chunk("cd"), chunk("", reason="stop"), USAGE)
    other = await got(chunk("b", 1, number=5), chunk("acd", reason="stop", number=5), USAGE)
    assert one.same_as(other) and one.text == "acd" and one.comments == [": a comment"]
    assert (one.pieces, other.pieces) == (6, 4)


@pytest.mark.parametrize(
    "events",
    [
        [chunk("a"), chunk("cX"), chunk("b", 1), chunk("", reason="stop"), USAGE],
        [chunk("acd"), chunk("b", 1), chunk("", reason="length"), USAGE],
        [chunk("acd"), chunk("b", 1), chunk("", reason="stop"), USAGE | {"usage": {"completion_tokens": 4}}],
        [chunk("acd"), chunk("b", 1), chunk("d"), chunk("", reason="stop"), USAGE],
        [chunk("acd"), chunk("", reason="stop"), USAGE],
    ],
)
async def test_every_other_difference_counts(events):
    one = await got(chunk("acd"), chunk("b", 1), chunk("", reason="stop"), USAGE)
    assert one.same_as(one) and not one.same_as(await got(*events))


async def test_an_answer_that_was_cut_off_is_not_the_same_as_itself():
    one = await got(chunk("acd"), done=False)
    assert not one.clean and not one.same_as(one)


def test_every_draw_has_a_seed():
    for kind, (path, body) in KINDS.items():
        assert path.startswith("/v1/") and ("seed" in body or body.get("temperature") == 0 or "input" in body), kind
