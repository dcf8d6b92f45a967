"""Replicas that die, hang, leave and come while streams run, and routers that are replaced: no byte is lost."""

import asyncio
import json
import os
import random
import signal

import pytest
from commands import run_here
from effort import proving
from small_fleet import PROMPT

from transect import SamplingParams
from transect.cluster import host, links
from transect.cluster.remote_engine import RemoteEngine
from transect.engine.frontends import wire
from transect.engine.scheduling.outputs import EngineOutput, RequestTimes
from transect.server.process import bind, serve_until


async def test_a_killed_engine_costs_no_byte_and_comes_back(small):
    await small.open(2)
    calm = await asyncio.gather(*(small.run(f"calm {seed}", seed=seed) for seed in range(6)))

    def kill(updates):
        if len(updates) == 5 and "hit 0" in small.fleet._where:
            os.kill(small.hosts[small.having("hit 0")].pid, signal.SIGKILL)

    while not small.fleet.handed_over:  # on a busy machine the kill may come after the last token
        await small.until(lambda: len(small.fleet.alive()) == 2)
        found = await asyncio.gather(
            *(small.run(f"hit {seed}", kill if not seed else lambda updates: None, seed=seed) for seed in range(6))
        )
        assert found == calm
    await small.until(lambda: len(small.fleet.alive()) == 2)  # the host has started another engine
    assert len(small.fleet.engines) == 2


async def test_a_replica_that_leaves_finishes_its_streams_and_gets_no_others(small):
    await small.open(2)
    calm = await small.run("calm", max_tokens=200)
    running, name = await small.begun("old", max_tokens=200)
    leaving = asyncio.create_task(small.hosts.pop(name).retire())
    await small.until(lambda: len(small.fleet.alive()) == 1)
    places = set()
    for n in range(4):
        await small.run(f"new {n}", lambda updates, n=n: places.add(small.having(f"new {n}")))
    assert places == set(small.hosts)
    assert await running == calm and small.fleet.handed_over == 0
    await leaving


async def test_a_cancelled_client_does_not_hold_a_replica_that_leaves(small):
    await small.open(2)
    running, name = await small.begun("long", max_tokens=4000)
    leaving = asyncio.create_task(small.hosts.pop(name).retire(3600.0))
    await small.until(lambda: len(small.fleet.alive()) == 1)
    running.cancel()
    await asyncio.wait_for(leaving, 200)
    assert small.fleet.handed_over == 0


async def test_streams_that_outlast_the_drain_continue_elsewhere(small, held):
    await small.open(2)
    running, name = await small.begun("long", max_tokens=100)
    await small.until(held.exists)
    await small.hosts.pop(name).retire(0.05)
    assert await running == await small.run("calm", max_tokens=100) and small.fleet.handed_over == 1


async def test_a_new_router_gets_the_running_engines(small):
    """The old router's requests are dropped in the engines, whose models stay loaded."""
    await small.open(2)
    pids = {host.pid for host in small.hosts.values()}
    lost, _ = await small.begun("lost", max_tokens=4000)
    await small.fleet.shutdown()
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await small.reopen()
    await small.until(lambda: len(small.fleet.alive()) == 2)
    text = await small.run("lost")  # the same id again: nothing of the old one comes
    assert text == await small.run("again")
    assert {host.pid for host in small.hosts.values()} == pids
    stats = await small.fleet.stats()
    assert stats.running == 0 and stats.finished["abort"] >= 1
    assert all(engine.decisions.header for engine in small.fleet.engines)


@pytest.mark.prove
async def test_a_stopped_engine_is_replaced_by_its_host(small):
    await small.open(2)
    calm = await small.run("calm", max_tokens=200)
    stopped = []

    def stop(updates):
        if len(updates) == 5 and not stopped:
            stopped.append(small.hosts[small.having("hit")].pid)
            os.kill(stopped[0], signal.SIGSTOP)

    assert await small.run("hit", stop, max_tokens=200) == calm and stopped
    await small.until(lambda: len(small.fleet.alive()) == 2)
    assert stopped[0] not in {host.pid for host in small.hosts.values()}


async def test_a_silent_machine_is_lost_after_a_while(small, held):
    """A host that neither closes its connection nor sends: a machine without power, or a cut cable."""
    await small.open(2)
    running, name = await small.begun("hit", max_tokens=100)
    await small.until(held.exists)
    small.hosts[name]._link.put = lambda kind, data: None
    assert await running == await small.run("calm", max_tokens=100)
    assert small.fleet.handed_over == 1


async def test_requests_wait_for_a_replica_and_give_up_in_time(small):
    await small.open(1)
    os.kill(small.hosts["replica-0"].pid, signal.SIGKILL)
    await small.until(lambda: not small.fleet.alive())
    assert (await small.fleet.health()).state == "hung"
    assert (await small.run("waits"))[2] == "length"


async def test_the_load_of_replicas_reaches_them_and_top(small, monkeypatch):
    monkeypatch.setenv("STUB_STEP_S", "0.02")
    await small.open(2)
    await small.until(lambda: all(host.load is not None for host in small.hosts.values()))
    running, name = await small.begun("long", max_tokens=3000)
    busy = small.hosts[name]
    await small.until(lambda: busy.load[1].running == 1 and busy.load[1].queued_tokens > 0)
    seen = await small.fleet.seen()
    assert (seen.ready, seen.running) == (2, 1) and seen.queued_tokens > 0
    running.cancel()
    await small.until(lambda: busy.load[1].queued_tokens == 0)
    shown = {each["name"]: each for each in small.fleet.replicas()}
    assert set(shown) == {"replica-0", "replica-1"} and {each["state"] for each in shown.values()} == {"ready"}
    sock, stop, ready = bind("127.0.0.1", 0), asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        serve_until(stop, small.fleet, small.settings.server, sock, lambda fleet: ready.set())
    )
    await ready.wait()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    await asyncio.gather(*(small.run(f"{number}", max_tokens=10) for number in range(4)))
    done = await asyncio.to_thread(run_here, "top", url, "--once")
    assert done.returncode == 0, done.stderr
    assert "replica-0\nlast" in done.stdout and "replica-1\nlast" in done.stdout
    await small.hosts.pop("replica-1").retire(0.0)
    await small.until(lambda: len(small.fleet.alive()) == 1)
    await small.until(lambda: {"ready", "gone"} == {each["state"] for each in small.fleet.replicas()})
    done = await asyncio.to_thread(run_here, "top", url, "--once", "--json")
    names = {json.loads(line)["engine"] for line in done.stdout.splitlines()}
    assert names == {"replica-0", "replica-1 (gone)"}
    stop.set()
    await serving


async def test_a_replica_that_dials_in_again_replaces_itself(small):
    await small.open(1)
    old = small.fleet.engines[0]
    small.hosts["replica-0"]._link.cut()
    await small.until(lambda: small.fleet.engines[0] is not old and small.fleet.alive())
    assert len(small.fleet.engines) == 1 and (await small.run("after"))[2] == "length"


async def test_a_silent_router_is_left(small, monkeypatch):
    """A router that neither closes connections nor sends, as on a machine without power."""
    await small.open(1)
    link = small.hosts["replica-0"]._link
    monkeypatch.setattr(host, "SILENT_REPORTS", 0.0)
    small.fleet.engines[0].link.put = lambda kind, data: None
    await small.until(lambda: small.hosts["replica-0"].linked and small.hosts["replica-0"]._link is not link)


@pytest.mark.prove
async def test_replaced_engines_leave_their_counts_and_nothing_else(small):
    await small.open(1)
    await small.run("one")
    before = await small.fleet.stats()
    for _ in range(2):
        old = small.fleet.engines[0]
        os.kill(small.hosts["replica-0"].pid, signal.SIGKILL)
        await small.until(lambda old=old: small.fleet.alive() and small.fleet.engines[0] is not old)
        await small.fleet.stats()
    after = await small.fleet.stats()
    assert after.generation_tokens == before.generation_tokens > 0 and after.kv_blocks_total == before.kv_blocks_total
    assert len(small.fleet._counted) == 2  # the living one, and the sum of the others


async def test_times_of_another_machine_are_shown_on_this_ones_clock(small):
    await small.open(1)
    engine = small.fleet.engines[0]
    assert isinstance(engine, RemoteEngine)
    engine._ahead, sent = 1000.0, []
    engine.link.put = lambda kind, data: sent.append((kind, data))
    await engine._send(wire.Submit("a", [1], {}, 1, arrival=5.0))
    kind, data = sent[0]
    assert kind == links.ENGINE and wire.decode_to_engine(data).arrival == 1005.0
    output = EngineOutput("nobody", 0, [], times=RequestTimes(1001.0, 1002.0, None))
    engine._take(output)
    assert output.times == RequestTimes(1.0, 2.0, None)


@pytest.mark.prove
async def test_a_hundred_kills_at_random_tokens_change_no_byte(small):
    await small.open(3)
    kills, rng = (100 if proving() else 10), random.Random(4)
    others = ({}, {"presence_penalty": 1.0}, {"stop": ["qx", "~~", "Z"], "min_tokens": 20}, {"temperature": 0.0})
    kinds = [{"seed": n, "max_tokens": 80, **each} for n, each in enumerate(others)]
    calm = await asyncio.gather(*(small.run(f"calm {n}", **each) for n, each in enumerate(kinds)))
    done = 0
    while done < kills:
        at, hit = rng.randint(1, 60), []

        def kill(updates, at=at, hit=hit, name=f"{done} 0"):
            if len(updates) >= at and not hit:
                hit.append(small.having(name))
                os.kill(small.hosts[hit[0]].pid, signal.SIGKILL)

        watch = [kill, *[lambda updates: None] * 3]
        found = await asyncio.gather(*(small.run(f"{done} {n}", watch[n], **each) for n, each in enumerate(kinds)))
        assert found == calm
        done += len(hit)
        await small.until(lambda: len(small.fleet.alive()) == 3)


@pytest.mark.prove
async def test_a_request_that_kills_replicas_ends_after_its_third(small):
    await small.open(3)
    poison = [*PROMPT, 7, 7]
    with pytest.raises(RuntimeError, match="replicas have ended with this request"):
        async for _ in small.fleet.stream(poison, SamplingParams(max_tokens=5), "poison"):
            pass


@pytest.mark.prove
async def test_a_slow_replica_gets_less_and_a_session_keeps_its_replica(small, monkeypatch):
    await small.open(1)
    monkeypatch.setenv("STUB_STEP_S", "0.02")
    await small.add("slow")
    await small.until(lambda: len(small.fleet.alive()) == 2)

    def pace(name):
        return next(each["pace"] for each in small.fleet.replicas() if each["name"] == name)

    async def busy(number):
        for turn in range(100):
            await small.run(f"{number} {turn}", max_tokens=40)
            if pace("slow") > 2 * pace("replica-0"):
                return

    await asyncio.gather(*(busy(number) for number in range(6)))
    assert pace("slow") > 2 * pace("replica-0")
    params, places = SamplingParams(seed=1, max_tokens=20), []
    for turn in range(4):
        prompt = [70 + turn] * 20  # no common prefix
        async for _ in small.fleet.stream(prompt, params, f"turn {turn}", session="s"):
            places.append(small.having(f"turn {turn}"))
    assert len(set(places)) == 1
