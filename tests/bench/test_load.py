"""Open and closed loop, and what is made of their records."""

import asyncio
import time

import pytest
from scripted_server import answer, chunked, event

from transect.bench.energy import Energy
from transect.bench.lengths import Lengths
from transect.bench.levels import Level, WorkSource, concurrency_levels, records_table, run_levels
from transect.bench.load import Record, Run, closed_loop, open_loop
from transect.bench.objectives import Objectives
from transect.bench.summary import percentile, summarize, warnings
from transect.bench.target import Target, served_model
from transect.bench.workload import Work


def work_at(*times):
    return [Work((1, 2, 3), 4, at) for at in times]


async def test_arrivals_do_not_wait_for_answers(server):
    """No answer comes before the last request has, and each is counted from when its request was due."""
    all_here = asyncio.Event()

    def script(body):
        if server.running == 4:
            all_here.set()
        return [all_here, *answer(2)]

    server.script = script
    run = await open_loop(Target(server.url, "m", timeout_s=20.0), work_at(0.0, 0.02, 0.04, 0.06))
    assert server.most == 4
    assert [record.due for record in run.records] == [0.0, 0.02, 0.04, 0.06]
    assert all(record.error is None and record.moments[0] >= 0.06 for record in run.records)
    assert run.records[0].ttft >= 0.06


async def test_a_late_generator_counts_against_the_server_and_is_reported(server):
    """The generator's loop stands still from the first request until after the second is due."""

    def script(body):
        if len(server.bodies) == 1:
            asyncio.get_running_loop().call_soon(time.sleep, 0.6)
        return answer(2)

    server.script = script
    run = await open_loop(Target(server.url, "m"), work_at(0.0, 0.4))
    late = run.records[1]
    assert late.sent - late.due > 0.1 and late.ttft > late.sent - late.due
    assert any("sent requests late" in sentence for sentence in warnings(summarize(run)))


async def test_closed_loop_keeps_its_concurrency(server):
    server.script = lambda body: [0.01, *answer(2)]
    run = await closed_loop(Target(server.url, "m"), work_at(*[0.0] * 12), 3)
    assert server.most == 3 and server.connections == 3 and len(run.records) == 12
    assert all(record.due <= record.sent for record in run.records)
    with pytest.raises(ValueError, match="concurrency must be at least 1"):
        await closed_loop(Target(server.url, "m"), [], 0)


async def test_what_is_sent(server):
    server.script = lambda body: answer(1)
    target = Target(server.url + "/v1", "m", "key", temperature=0.5, extra={"top_k": 7})
    await closed_loop(target, [Work((5, 6), 9)], 1)
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [5, 6],
            "max_tokens": 9,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": 7,
        }
    ]
    assert b"POST /v1/completions" in server.heads[0] and b"Bearer key" in server.heads[0]
    chat = Target(server.url, "m", endpoint="chat", ignore_eos=False)
    assert b'"messages":[{"role":"user","content":"hi"}]' in chat.body(Work("hi", 1))
    assert b"ignore_eos" not in chat.body(Work("hi", 1))
    with pytest.raises(ValueError, match="chat takes text"):
        chat.body(Work((1,), 1))


async def test_tokens_are_counted_by_usage_and_timed_by_events(server):
    chat = [b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', 0.05]
    chat += [b'data: {"choices": [{"delta": {"content": "two words"}}]}\n\n', 0.05]
    chat += [b'data: {"choices": [{"delta": {"content": "."}}]}\n\n', event("", reason="stop")]
    usage = event(usage={"prompt_tokens": 11, "completion_tokens": 5})

    def script(body):
        head, *_, end = chunked()
        pieces = [piece if isinstance(piece, float) else chunked(piece)[1] for piece in [*chat, usage]]
        return [head, *pieces, end]

    server.script = script
    (record,) = (await closed_loop(Target(server.url, "m", endpoint="chat"), [Work("hi", 5)], 1)).records
    assert (record.input_tokens, record.output_tokens, len(record.moments)) == (11, 5, 2)
    assert record.ttft >= 0.045 and len(record.gaps) == 1 and record.gaps[0] >= 0.045
    assert record.tpot == pytest.approx(record.gaps[0] / 4)


async def test_errors_by_kind(server):
    answers = {
        1: answer(1),
        2: [b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nwait"],
        3: chunked(event("a"), b'data: {"error": {"message": "dead"}}\n\n'),
        4: chunked(b"data: [DONE]\n\n"),
        5: [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"],
        6: chunked(b"data: nonsense\n\n"),
    }
    server.script = lambda body: answers[body["max_tokens"]]
    run = await closed_loop(Target(server.url, "m"), [Work((1,), kind) for kind in answers], 1)
    level = summarize(run, Objectives.parse("ttft=10s"))
    assert level["succeeded"] == 1
    assert level["errors"] == {"http 429": 1, "error in stream": 1, "bad reply": 3}
    assert "dead" in level["error_examples"]["error in stream"]
    assert level["goodput"]["share"] == pytest.approx(1 / 6)
    assert sum("failed" in sentence for sentence in warnings(level)) == 3


async def test_levels_after_a_warm_up(server):
    server.script = lambda body: answer(body["max_tokens"])
    source = WorkSource(Lengths.parse("3"), Lengths.parse("4"))
    levels = [*concurrency_levels(source, 4, [2]), Level("requests/s", 50.0, work_at(0.0, 0.02))]
    two, rate = await run_levels(Target(server.url, "m"), levels, warm_up=source.draw(5, "warm-up"))
    assert len(server.bodies) == 5 + 4 + 2
    assert (two.summary["load"], two.summary["load_unit"], two.summary["output_tokens"]) == (2, "at a time", 16)
    assert rate.summary["requests"] == 2 and str(rate.level) == "50 requests/s"
    rows = list(records_table([two, rate]))
    assert len(rows) == 6 and rows[0]["output_tokens"] == 4


async def test_served_model(server):
    body = b'{"data": [{"id": "first"}, {"id": "second"}]}'
    server.script = lambda _: [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]
    assert await served_model(server.url) == "first"
    server.script = lambda _: [b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"]
    with pytest.raises(ValueError, match=r"status 401\): give --model"):
        await served_model(server.url)
    with pytest.raises(ValueError, match="does not answer"):
        await served_model("http://127.0.0.1:1")


def record(due, first, *gaps, tokens=None, error=None):
    moments = [due + first]
    for gap in gaps:
        moments.append(moments[-1] + gap)
    count = len(moments) if tokens is None else tokens
    return Record(due, due, moments, moments[-1], input_tokens=10, output_tokens=count, error=error)


def test_percentiles():
    assert [percentile(range(1, 101), share) for share in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([3.0], 99) == 3.0
    assert percentile([1, 2, 3, 4], 50) == 2 and percentile([1, 2, 3, 4], 51) == 3


def test_summary_of_known_records():
    run = Run([record(1.0, 0.5, 0.1, 0.1), record(2.0, 0.25, 0.05), record(3.0, 1.0, error="timeout")], 4.0, 0.2)
    level = summarize(run, energy=Energy(joules=30.0, seconds=3.0, method="counter"))
    assert level["seconds"] == pytest.approx(3.0)
    assert level["output_tokens_per_second"] == pytest.approx(5 / 3) and level["input_tokens"] == 20
    assert level["ttft"]["max"] == pytest.approx(0.5) and level["itl"]["p50"] == pytest.approx(0.1)
    assert level["e2e"]["p99"] == pytest.approx(0.7)
    assert level["concurrency"] == pytest.approx((0.7 + 0.3 + 1.0) / 3)
    assert level["energy"]["joules_per_output_token"] == pytest.approx(6) and level["energy"]["watts"] == 10
    assert "goodput" not in level


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft=500ms", True),
        ("ttft=0.4s", False),
        ("itl=200ms", True),  # 19 of 20 gaps keep it
        ("itl=50ms", False),
        ("tpot=150ms", True),
        ("tpot=140ms", False),
        ("e2e=3.5s,ttft=1s", True),
        ("e2e=3.3s,ttft=1s", False),
    ],
)
def test_objectives(text, met):
    assert Objectives.parse(text).met_by(record(0.0, 0.5, *[0.1] * 19, 1.0)) is met
    assert not Objectives.parse(text).met_by(record(0.0, 0.01, error="timeout"))


@pytest.mark.parametrize("text", ["ttft", "ttft=5", "speed=1s", "ttft=1s,ttft=2s", ""])
def test_objectives_that_are_none(text):
    with pytest.raises(ValueError, match="is not understood"):
        Objectives.parse(text)


def test_itl_is_said_to_be_between_events_where_tokens_come_together():
    run = Run([record(0.0, 0.1, 0.1, tokens=6)], 1.0, 0.95)
    found = " ".join(warnings(summarize(run)))
    assert "3.00 tokens an event" in found and "95% of a core" in found


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from transect.bench.levels import Result
    from transect.bench.plots import plot

    run = Run([record(0.0, 0.1, 0.1), record(0.5, 0.1, 0.2)], 1.0, 0.1)
    result = Result(Level("requests/s", 2.0, []), {"load": 2, "load_unit": "requests/s", **summarize(run)}, run.records)
    plot([result], tmp_path / "one.png")
    plot([result, result], tmp_path / "two.svg")
    assert (tmp_path / "one.png").stat().st_size > 1000 and "Requests per second" not in (tmp_path / "one.png").name
    assert (tmp_path / "two.svg").read_text().startswith("<?xml")
