"""``GET /live``: an engine's steps, queue and KV blocks as they happen; all for operators, their own for others."""

import asyncio
import itertools
import json
import threading
import time
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from decision_logs import log_for
from small_engine import make, request
from stub_server import Load, StubServer
from tiny_llm import save_tiny_llm

from transect.engine.scheduling.clock import WallClock
from transect.engine.scheduling.snapshot import snapshot
from transect.explain.engine.kv_map import HIDDEN
from transect.server.http.clients import Client
from transect.server.operations import live
from transect.server.operations.live import Watches, deltas_of
from transect.server.operations.live_reader import LiveReader
from transect.server.operations.live_routes import until_the_end

PATIENCE_S = 60
OPERATOR, ALICE = Client("operator", operator=True), Client("alice")


class Engine:
    """An engine in this process, stepped by the test, as ``AsyncEngine`` shows it."""

    config = SimpleNamespace(decisions=True)

    def __init__(self, **limits):
        self.core = make(**limits)
        self.core.scheduler.clock = WallClock()
        self.core.decisions = log_for(self.core)
        self.looks = 0
        self.dead = False

    @property
    def decisions(self):
        return self.core.decisions.ring

    async def look(self, requests=False):
        self.looks += 1
        if self.dead:
            raise RuntimeError("it was killed")
        return snapshot(self.core.scheduler, requests)


def added(engine, name, client="", **options):
    """Queue a request of a client."""
    engine.core.add(msgspec.structs.replace(request(name, **options), client=client))


async def read(reader, watch, wanted, drive=lambda: None):
    """Events of a reader, the engine driven in between, until ``wanted(events)``."""
    events = []
    source = reader.events(deltas_of(watch))
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for event in source:
                events.append(json.loads(event.removeprefix(b"data: ")))
                if wanted(events):
                    return events
                drive()
    finally:
        await source.aclose()


def steps_of(events):
    """All steps with their rows, as the page rebuilds them."""
    found, rows = [], []
    for event in events:
        for step in event.get("steps", ()):
            given = step[5]
            rows = [(s, a + c, 1) for s, a, c in rows]
            if given is not None:
                rows = list(zip(*[iter(given)] * 3, strict=True))
            found.append((step[0], rows))
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(live, "TICK_S", 0.005)
    monkeypatch.setattr(live, "LOOK_S", 0.01)
    monkeypatch.setattr(live, "QUIET_S", 0.01)


async def test_a_reader_sees_every_step_and_the_queue_and_nothing_is_collected_without_one():
    engine = Engine(max_num_seqs=2)
    watches = Watches(engine)
    watch = watches.of(0)
    for name in "abc":
        added(engine, name, "alice" if name == "a" else "bob", first=ord(name), max_tokens=12)
    for _ in range(3):
        engine.core.step()
    assert engine.looks == 0 and watch.log is None
    events = await read(
        LiveReader(watch, 0, 1, OPERATOR),
        watch,
        lambda events: not engine.core.has_work and events[-1].get("ends", [[0] * 5])[-1][3] == 12,
        engine.core.step,
    )
    first = events[0]
    assert first["type"] == "state" and first["operator"] and first["limits"]["num_blocks"] == 64
    assert [each["id"] for each in first["requests"]] == ["a", "b", "c"] and len(first["steps"]) == 3
    assert first["reason"] == "places" and first["waiting"] == [[2, False]]
    batches = dict(steps_of(events))
    assert list(batches) == list(range(1, engine.core.scheduler.stats().steps + 1))
    for seq in range(3):  # the rows of each sequence follow one another, up to its last token but one
        rows = [row for rows in batches.values() for row in rows if row[0] == seq]
        assert all(a[1] + a[2] == b[1] for a, b in itertools.pairwise(rows))
        assert rows[-1][1] + rows[-1][2] == 6 + 12 - 1
    assert watch.readers == 0 and watch.log is None
    looks = engine.looks
    await asyncio.sleep(0.05)
    assert engine.looks == looks, "the engine is asked although nobody reads"


async def test_a_client_sees_its_own_requests_only():
    engine = Engine()
    watch = Watches(engine).of(0)
    added(engine, "alice-1", "alice", prompt=9, max_tokens=10)
    added(engine, "bob-1", "bob", prompt=9, first=5, max_tokens=20)
    engine.core.step()

    def drive():
        engine.core.step()
        if engine.core.scheduler.stats().steps == 6:
            added(engine, "bob-2", "bob", first=8, max_tokens=5)
            added(engine, "alice-2", "alice", first=9, max_tokens=5)

    events = await read(
        LiveReader(watch, 0, 1, ALICE),
        watch,
        lambda events: not engine.core.has_work and sum(len(event.get("ends", ())) for event in events) == 2,
        drive,
    )
    text = json.dumps(events)
    assert "bob" not in text and "alice-1" in text and "alice-2" in text
    mine = {each["seq"] for event in events for each in event.get("requests", ())}
    assert {row[0] for _, rows in steps_of(events) for row in rows} == mine
    assert {end[0] for event in events for end in event.get("ends", ())} == mine
    owners = {owner for event in events for owner in event.get("kv", ())[2::4]}
    assert owners <= {*mine, HIDDEN} and not any("stats" in event or "queue" in event for event in events)


async def test_the_bill_of_a_followed_request_grows():
    engine = Engine()
    watch = Watches(engine).of(0)
    added(engine, "a", "alice", prompt=30, max_tokens=20)
    engine.core.step()  # reads 16 tokens of the prompt
    live_events = await read(
        LiveReader(watch, 0, 1, ALICE, "chatcmpl-a"),
        watch,
        lambda events: (events[-1].get("bill") or {}).get("finish_reason") == "length",
        engine.core.step,
    )
    bills = [event["bill"] for event in live_events if event.get("bill")]
    assert not bills[0]["first_token"] and bills[0]["ttft"]["parts_ms"]
    assert bills[-1]["output_tokens"] == 20
    for span in (bills[-1]["ttft"], bills[-1]["decode"]):
        assert sum(span["parts_ms"].values()) == pytest.approx(span["ms"])


async def test_a_reader_that_falls_behind_begins_anew():
    engine = Engine()
    watch = Watches(engine).of(0)
    added(engine, "a", max_tokens=40)
    source = LiveReader(watch, 0, 1, OPERATOR).events(deltas_of(watch))
    assert b'"state"' in await anext(source)
    keeper = asyncio.create_task(
        read(LiveReader(watch, 0, 1, OPERATOR), watch, lambda events: len(events) > 400, engine.core.step)
    )
    while watch._number < 2 * live.KEPT + 2:  # as many deltas as nobody keeps
        engine.core.step()
        if not engine.core.has_work:
            added(engine, f"more {watch._number}", first=watch._number % 90 + 1, max_tokens=40)
        await asyncio.sleep(0.002)
    found = await anext(source)
    assert b'"state"' in found
    keeper.cancel()
    await source.aclose()


async def test_an_engine_that_ends_and_comes_back_is_shown_so():
    first, second = Engine(), Engine()
    whole = SimpleNamespace(engines=[first], routed=[], num_routed=0)
    watch = Watches(whole).of(0)
    added(first, "a", max_tokens=5)
    added(second, "b", max_tokens=5)

    def drive():
        first.dead = True

    def wanted(events):
        if events[-1]["type"] == "down":
            whole.engines[0] = second
        return events[-1]["type"] == "state" and len(events) > 1

    events = await read(LiveReader(watch, 0, 1, OPERATOR), watch, wanted, drive)
    assert "it was killed" in next(each for each in events if each["type"] == "down")["reason"]
    assert [each["id"] for each in events[-1]["requests"]] == ["b"]


@pytest.mark.parametrize(
    ("address", "status", "code"),
    [("/live", 404, "no_decisions"), ("/live?engine=3", 404, None), ("/live?follow=chatcmpl-1", 404, None)],
)
async def test_what_cannot_be_watched_is_refused(client, address, status, code):
    response = await client.get(address)
    assert response.status_code == status
    assert code is None or response.json()["error"]["code"] == code


def events_of(server, key, until, **query):
    """Read events over HTTP."""
    events = []
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{server.url}/live", params=query, headers=headers, timeout=PATIENCE_S) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
                if until(events):
                    break
    return events


def both_are_seen(events):
    """True once there were steps, and blocks with owners."""
    owned = any(owner >= 0 for event in events for owner in event.get("kv", ())[2::4])
    return owned and sum(len(event.get("steps", ())) for event in events) > 30


def test_replicas_under_load_are_watched_with_the_routers_choices(server):
    with Load(server, 8, "key-of-bob", max_tokens=30):
        for engine in (0, 1):
            events = events_of(server, "key-of-admin", both_are_seen, engine=engine)
            assert events[0]["engines"] == 2 and events[0]["engine"] == engine
            routed = [each for event in events for each in event.get("routed", ())]
            assert routed and {each["to"] for each in routed} <= {0, 1} and len(routed[0]["offers"]) == 2
        mine = events_of(server, "key-of-alice", lambda events: len(events) == 2)
        assert mine[0]["requests"] == [] and mine[0]["steps"] == [] and not mine[0]["operator"]
    for key, status in (("nothing", 401), ("key-of-alice", 200)):
        with httpx.stream("GET", f"{server.url}/live", headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status_code == status


def test_the_recent_load_is_predicted_with_fewer_places(server):
    with Load(server, 6, "key-of-bob", max_tokens=30):
        events_of(server, "key-of-admin", both_are_seen)
    address, body = f"{server.url}/v1/decisions/what-if", {"set": {"max_num_seqs": 1}}
    found = httpx.post(address, json=body, headers={"Authorization": "Bearer key-of-admin"}, timeout=PATIENCE_S)
    assert found.status_code == 200, found.text
    predicted = found.json()
    assert predicted["changes"] == {"max_num_seqs": 1} and predicted["measured"]["requests"] >= 1
    assert predicted["predicted"]["tokens_per_second"] < predicted["simulated_unchanged"]["tokens_per_second"]


def test_a_bill_is_for_its_own_client(server):
    answer = server.complete(key="key-of-alice", max_tokens=5).json()
    refused = httpx.get(
        f"{server.url}/live", params={"follow": answer["id"]}, headers={"Authorization": "Bearer key-of-bob"}
    )
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "request_not_found"
    found = []
    for engine in (0, 1):
        state = events_of(server, "key-of-alice", lambda events: True, engine=engine, follow=answer["id"])[0]
        found.append(state["bill"])
    assert sorted(each["known"] for each in found) == [False, True]
    (bill,) = [each for each in found if each["known"]]
    assert bill["output_tokens"] == 5 and bill["finish_reason"] == "length"


async def test_a_stream_ends_when_the_server_drains():
    engine = Engine()
    watch = Watches(engine).of(0)
    serving = SimpleNamespace(draining=False, handed_over=False)
    source = until_the_end(serving, LiveReader(watch, 0, 1, OPERATOR).events(deltas_of(watch)))
    assert b'"state"' in await anext(source)
    serving.draining = True
    async with asyncio.timeout(PATIENCE_S):
        rest = [event async for event in source]
    assert len(rest) < 100 and watch.readers == 0


@pytest.mark.prove
def test_a_page_that_watches_does_not_delay_the_end_of_the_server(tmp_path):
    save_tiny_llm(tmp_path)
    server = StubServer(tmp_path, "--grace", "60")
    seen, ends = threading.Event(), []

    def watch():
        ends.extend(events_of(server, "none", lambda events: seen.set() or events[-1]["type"] == "bye"))

    thread = threading.Thread(target=watch)
    thread.start()
    assert seen.wait(PATIENCE_S)
    began = time.monotonic()
    server.stop()
    thread.join()
    assert server.process.returncode == 0 and ends[-1] == {"type": "bye"}
    assert time.monotonic() - began < 60, "it waited for the reader as for a request"
