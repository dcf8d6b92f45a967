"""Replicas that are killed or stopped lose no byte of a stream. The engines are real processes without a model."""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import stub_engine
from effort import proving
from stub_engine import POISON
from tiny_llm import save_tiny_llm

from transect import SamplingParams
from transect.engine.config import EngineConfig
from transect.engine.frontends import supervisor
from transect.engine.frontends.async_engine import AsyncEngine
from transect.engine.frontends.replicas import Replicas
from transect.engine.frontends.streams import EngineDeadError
from transect.engine.scheduling.arrivals import seed_of
from transect.explain.engine.bill import bill
from transect.explain.engine.log import build
from transect.explain.engine.work import StepWork

PROMPT = list(range(65, 85))
KINDS = {
    "greedy": {"temperature": 0.0, "max_tokens": 60},
    "choices": {"n": 3, "max_tokens": 40, "logprobs": 1},
    "penalties": {"presence_penalty": 1.0, "max_tokens": 50},
    "stop strings": {"stop": ["qx", "~~", "a b", "Z"], "min_tokens": 20, "max_tokens": 80},
    "prompt logprobs": {"max_tokens": 30, "logprobs": 0},
    "one token": {"max_tokens": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return folder


@pytest.fixture
def start(model, monkeypatch):
    """Starts replicas whose steps take two milliseconds."""
    monkeypatch.setattr(AsyncEngine, "process_module", "stub_engine")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(stub_engine.__file__).parent), "src"]))
    monkeypatch.setenv("STUB_STEP_S", "0.002")

    def start_replicas(count=3, **settings):
        return Replicas.start(EngineConfig(model=str(model), data_parallel_size=count, **settings))

    return start_replicas


@pytest.fixture
def kill(monkeypatch, tmp_path):
    """Kills the first replica of a request after half of its answer: there the replica waits to be killed."""
    held = tmp_path / "held"
    monkeypatch.setenv("STUB_HOLD", str(held))
    killed = []

    def kill_at_hold(engines, request_id):
        if not killed:
            while not held.exists():
                time.sleep(0.001)
            killed.append(request_id)
            os.kill(engines._where[request_id].pid, signal.SIGKILL)

    return kill_at_hold


async def run(engines, name, prompt=None, seed=1, seen=lambda updates: None, **params):
    """The updates of a request as one: for every choice its text, tokens, logprobs and end."""
    updates = []
    params = SamplingParams(**{"seed": seed} | params)
    async for update in engines.stream(prompt or PROMPT, params, name):
        updates.append(update)
        seen(updates)
    final = updates[-1].final
    for choice in final.outputs:
        own = [update for update in updates if update.index == choice.index]
        assert "".join(update.text for update in own) == choice.text
        assert [token for update in own for token in update.token_ids] == choice.token_ids
        assert sum(update.finished for update in own) == 1
    found = [(c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in final.outputs]
    return found, any(update.approximate for update in updates)


async def until(condition):
    async with asyncio.timeout(200):
        while not condition():
            await asyncio.sleep(0.01)


async def test_kills_and_stops_at_random_tokens_change_no_byte(start):
    rng = random.Random(1)
    async with await start(hung_after_s=0.6) as engines:
        whole = {kind: (await run(engines, kind, **params))[0] for kind, params in KINDS.items()}
        turn, turns = -1, 50 if proving() else 5
        while (turn := turn + 1) < turns or engines.handed_over < turns // 2:  # a kill may come after the last token
            await until(lambda: len(engines.alive()) >= 2)
            victim, at = rng.choice(list(KINDS)), rng.randint(1, 30)
            how = signal.SIGSTOP if turn % 4 == 3 else signal.SIGKILL

            def hit(updates, name=f"{victim} {turn}", at=at, how=how):
                if len(updates) == min(at, len(whole[name.rpartition(" ")[0]][0][1])) and name in engines._where:
                    os.kill(engines._where[name].pid, how)

            runs = {
                kind: run(engines, f"{kind} {turn}", seen=hit if kind == victim else lambda updates: None, **params)
                for kind, params in KINDS.items()
            }
            for kind, (found, approximate) in zip(runs, await asyncio.gather(*runs.values()), strict=True):
                assert found == whole[kind], (turn, kind)
                assert not approximate
        await until(lambda: len(engines.alive()) == 3)
        assert (await engines.health()).detail == "all 3 replicas make progress"


async def test_a_client_continues_an_answer_from_any_of_its_tokens(start):
    """Same seed, same choice, same rest; another token leads elsewhere."""
    async with await start(1) as engines:
        for kind in ("greedy", "choices", "penalties", "stop strings"):
            params = SamplingParams(**{"seed": 5} | KINDS[kind])
            whole, _ = await run(engines, kind, seed=5, **KINDS[kind])
            for choice, (text, tokens, reason, _, logprobs) in enumerate(whole):
                for count in (1, len(tokens) // 2, len(tokens) - 1):
                    given = (*[None] * choice, tuple(tokens[:count]))
                    again = params.with_(n=choice + 1)
                    stream = engines.stream(PROMPT, again, f"{kind} {choice} {count}", output_token_ids=given)
                    updates = [update async for update in stream]
                    assert updates[0].given and updates[0].token_ids == tokens[:count]
                    assert not any(update.given for update in updates[1:])
                    final = updates[-1].final.outputs[choice]
                    assert (final.text, final.token_ids, final.finish_reason) == (text, tokens, reason)
                    assert final.logprobs == (None if logprobs is None else logprobs[count:])
                    assert "".join(update.text for update in updates) == text
        other = (*tokens[:3], (tokens[3] + 1) % 90 + 33)
        stream = engines.stream(PROMPT, params, "other", output_token_ids=(other,))
        assert [u async for u in stream][-1].final.outputs[0].token_ids[:5] != tokens[:5]


async def test_a_given_beginning_with_a_stop_string_ends_there(start):
    async with await start(1) as engines:
        params = SamplingParams(seed=1, stop=["ab"], max_tokens=9)
        stream = engines.stream(PROMPT, params, "stop", output_token_ids=(tuple(engines.tokenizer.encode("xxabcd")),))
        updates = [update async for update in stream]
        assert [(u.text, u.finish_reason, u.stop_reason) for u in updates] == [("xx", "stop", "ab")]
        assert (await engines.stats()).running == 0


async def test_the_decisions_of_both_engines_are_on_the_bill(start, kill):
    async with await start(2) as engines:
        await run(engines, "a", max_tokens=50, seen=lambda updates: kill(engines, "a"))
        await until(lambda: len(engines.alive()) == 2)
        await engines.stats()
        (past,) = engines.past_decisions
        rings = [engine.decisions for engine in engines.engines]
        (having,) = [log for log in (build(ring.records()) for ring in rings if ring.header) if log.has("a")]
        work = StepWork.of(having.header, None)
        found = bill(having, "a", work, earlier=[(build(past.records()), work)])
    assert (found.engines, found.output_tokens, found.finish_reason) == (2, 50, "length")
    assert sum(found.decode.parts.values()) == pytest.approx(found.decode.seconds)
    assert found.decode.parts["hand-over"] > 0 and found.decode.parts["recompute"] > 0


async def test_the_router_fixes_the_seed_of_a_sampled_request(start, kill):
    async with await start(2, seed=9) as engines:
        found, _ = await run(engines, "a", seed=None, max_tokens=50, seen=lambda updates: kill(engines, "a"))
        assert engines.handed_over == 1
        assert (await run(engines, "b", seed=seed_of(9, 0), max_tokens=50))[0] == found


async def test_a_request_that_kills_replicas_ends_with_an_error_and_the_others_go_on(start):
    async with await start() as engines:
        whole, _ = await run(engines, "whole", max_tokens=200)
        others = [asyncio.create_task(run(engines, f"{i}", max_tokens=200)) for i in range(5)]
        with pytest.raises(EngineDeadError, match=r"3 replicas have ended with this request.*exited with code 3"):
            await run(engines, "poison", prompt=[1, POISON, POISON])
        assert [found for found, _ in await asyncio.gather(*others)] == [whole] * 5


async def test_where_bits_are_not_promised_the_stream_goes_on_and_says_so(start, kill, monkeypatch):
    monkeypatch.setenv("STUB_EXACT", "0")
    async with await start(2) as engines:
        approximate = []

        def see(updates):
            approximate.append(updates[-1].approximate)
            kill(engines, "a")

        (((_, tokens, reason, _, _),), told) = await run(engines, "a", max_tokens=50, seen=see)
        assert told and len(tokens) == 50 and reason == "length"
        assert sum(approximate) == 1 and not approximate[0]


async def test_a_client_that_aborts_or_leaves_while_no_replica_lives(start):
    async with await start(2) as engines:
        ends = []

        async def watch(name):
            async for update in engines.stream(PROMPT, SamplingParams(max_tokens=None, seed=1), name):
                ends.append(update)

        staying, leaving = (asyncio.create_task(watch(name)) for name in ("staying", "leaving"))
        await until(lambda: len({update.request_id for update in ends}) == 2)
        for engine in engines.engines:
            os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: not engines.alive() and not engines._where)
        assert (await engines.health()).state == "hung"
        leaving.cancel()
        await engines.abort("staying")
        await staying
        assert ends[-1].request_id == "staying" and ends[-1].finish_reason == "abort"
        assert len(ends[-1].final.outputs[0].token_ids) == sum(
            len(u.token_ids) for u in ends if u.request_id == "staying"
        )
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not engines._streams
        assert (await run(engines, "next", max_tokens=2))[0], "a request that comes while none lives waits"
        assert (
            sum([(await engine.stats()).generation_tokens for engine in engines.engines if engine.death is None]) == 2
        )


async def test_replicas_that_cannot_be_started_again_are_given_up(start, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    async with await start(2) as engines:
        monkeypatch.setattr(AsyncEngine, "process_module", "no_such_module")
        running = asyncio.create_task(run(engines, "a", max_tokens=None))
        await until(lambda: "a" in engines._where)
        for engine in engines.engines:
            os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await running
        assert (await engines.health()).state == "dead"


async def test_reload_drops_no_stream(start):
    async with await start(2) as engines:
        whole, _ = await run(engines, "whole", max_tokens=400)
        running = [asyncio.create_task(run(engines, f"{i}", max_tokens=400)) for i in range(4)]
        await until(lambda: len(engines._where) == 4)
        before = list(engines.engines)
        await engines.reload(drain_s=30)
        assert not set(before) & set(engines.engines)
        assert [found for found, _ in await asyncio.gather(*running)] == [whole] * 4
        assert engines.handed_over == 0
        await until(lambda: all(engine.death is not None for engine in before))


async def test_streams_that_outlive_a_reload_continue_only_where_bits_are_the_same(start, monkeypatch):
    async with await start(2) as engines:
        whole, _ = await run(engines, "whole", max_tokens=800)
        running = asyncio.create_task(run(engines, "same", max_tokens=800))
        await until(lambda: "same" in engines._where)
        await engines.reload(drain_s=0.1)
        assert (await running)[0] == whole
        running = asyncio.create_task(run(engines, "other", max_tokens=None))
        await until(lambda: "other" in engines._where)
        monkeypatch.setenv("STUB_EXACT", "0")
        await engines.reload(drain_s=0.1)
        with pytest.raises(EngineDeadError, match="--drain-timeout"):
            await running
        with pytest.raises(ValueError, match="cannot become 3"):
            await engines.reload(EngineConfig(model="m", data_parallel_size=3))


async def test_a_process_that_computes_gets_more_time_than_one_that_is_stopped():
    spinning = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        await until(lambda: supervisor.is_busy(spinning.pid))
        spinning.send_signal(signal.SIGSTOP)
        await until(lambda: not supervisor.is_busy(spinning.pid))
    finally:
        spinning.kill()
        await spinning.wait()


async def test_a_replica_that_hangs_while_it_starts_is_started_once_more(start, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "START_S", 0.5)
    monkeypatch.setattr(supervisor, "START_RATIO", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    async with await start(2) as engines:
        monkeypatch.setenv("STUB_HANGS", "1")
        os.kill(engines.engines[0].pid, signal.SIGKILL)
        await until(lambda: "it was not ready after 0 s and was killed" in caplog.text)
        monkeypatch.setattr(supervisor, "START_S", 60.0)
        monkeypatch.delenv("STUB_HANGS")
        await until(lambda: len(engines.alive()) == 2)
        assert (await run(engines, "a", max_tokens=2))[0]
