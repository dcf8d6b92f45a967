"""Several engines behind one face: requests are spread, and the end of one is not that of the others."""

import asyncio
import contextlib
import os
import signal
from types import SimpleNamespace

import pytest
from tiny_llm import save_tiny_llm

from transect import SamplingParams
from transect.engine.config import EngineConfig
from transect.engine.frontends.async_engine import EngineDeadError, EngineHealth
from transect.engine.frontends.replicas import Replicas, config_of, start_engines
from transect.engine.frontends.streams import OutputStream, RequestOptions
from transect.engine.numerics import UNKNOWN
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.policies.admission import QueueFull
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.text.output_processor import Update

SETTINGS = {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 64, "max_num_seqs": 8}


def test_every_replica_has_devices_of_its_own():
    config = EngineConfig(model="m", data_parallel_size=3, tensor_parallel_size=2, decision_log="log")
    parts = [config_of(config, index) for index in range(3)]
    assert [part.first_device for part in parts] == [0, 2, 4]
    assert [part.decision_log for part in parts] == ["log.0", "log.1", "log.2"]
    assert config_of(EngineConfig(model="m", decision_log="log"), 0).decision_log == "log"
    assert {(part.data_parallel_size, part.tensor_parallel_size) for part in parts} == {(1, 2)}


class Fake:
    """An engine that says its own name as often as there are tokens in a prompt."""

    info = SimpleNamespace(kv_tokens=64, numerics=UNKNOWN)
    death, max_model_len, tokenizer, vocab_size, retired = None, 64, None, 8, False

    def __init__(self, name):
        self.name, self.runs = name, set()

    def open(self, ids, params, request_id, **options):
        return OutputStream(request_id, ids, params, RequestOptions())

    async def follow(self, stream):
        self.runs.add(stream.request_id)
        for _ in stream.prompt_token_ids:
            await asyncio.sleep(0)
            yield Update(stream.request_id, 0, token_ids=[1])
        stream.left = 0
        self.runs.discard(stream.request_id)

    async def stats(self):
        if self.death is not None:
            raise EngineDeadError(self.death)
        return self.said

    async def health(self):
        return EngineHealth("ok" if self.death is None else "dead", self.death or "")

    def snapshot(self, request_id):
        return self.name if request_id in self.runs else None


async def test_news_of_a_request_come_from_the_replica_that_has_it():
    engines = Replicas(EngineConfig(model="m", data_parallel_size=2), [Fake("first"), Fake("second")])

    async def run():
        return [found async for found in engines.generate([1, 2, 3], SamplingParams())]

    assert await asyncio.gather(run(), run()) == [["first"] * 3, ["second"] * 3]


async def test_an_id_in_use_is_refused_whichever_replica_has_it():
    engines = Replicas(EngineConfig(model="m", data_parallel_size=2), [Fake("first"), Fake("second")])
    first = engines.generate([1, 2, 3], SamplingParams(), "same")
    await anext(first)
    with pytest.raises(ValueError, match="already running"):
        await anext(engines.generate([1], SamplingParams(), "same"))
    assert [found async for found in first] == ["first"] * 2


async def test_a_full_replica_passes_requests_on():
    fakes = Fake("first"), Fake("second")

    async def full(stream):
        raise QueueFull(3, 1.5)
        yield

    engines = Replicas(EngineConfig(model="m", data_parallel_size=2), fakes)
    fakes[0].follow = full
    assert [found async for found in engines.generate([1, 2, 3], SamplingParams())] == ["second"] * 3
    fakes[1].follow = full
    with pytest.raises(QueueFull):
        await anext(engines.generate([1, 2, 3], SamplingParams()))
    assert [engines._router.load(index) for index in range(2)] == [0, 0] and not engines._where


async def test_no_counter_goes_back_when_a_replica_ends():
    said = Scheduler(SchedulerConfig(num_blocks=8), VirtualClock()).stats()
    said.generation_tokens, said.running, said.finished = 5, 2, {"stop": 3}
    fakes = Fake("first"), Fake("second")
    for fake in fakes:
        fake.said = said
    engines = Replicas(EngineConfig(model="m", data_parallel_size=2), fakes)
    both = await engines.stats()
    assert (both.generation_tokens, both.running, both.kv_blocks_total) == (10, 4, 16)
    fakes[0].death = "it was killed"
    one = await engines.stats()
    assert (one.generation_tokens, one.finished, one.running, one.kv_blocks_total) == (10, {"stop": 6}, 2, 8)
    report = await engines.health()
    assert (report.state, report.detail) == ("ok", "1 of 2 replicas make progress; replica 0 is dead: it was killed")
    fakes[1].death = "it was killed"
    with pytest.raises(EngineDeadError):
        await engines.stats()


@pytest.mark.prove
async def test_without_fail_over_one_dead_replica_does_not_end_the_streams_of_the_other(tmp_path):
    save_tiny_llm(tmp_path)
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    async with await start_engines(model=str(tmp_path), data_parallel_size=2, fail_over=False, **SETTINGS) as engines:
        pids = {engine.pid for engine in engines.engines}
        assert len(pids) == 2
        short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        first = [[o async for o in engines.generate([i, 5, 6], short)][-1] for i in range(4)]
        assert all(len(each.outputs[0].token_ids) == 4 for each in first)
        each = [(await engine.stats()).generation_tokens for engine in engines.engines]
        assert each == [8, 8] and (await engines.stats()).generation_tokens == 16

        async def run(start):
            outputs = engines.generate([start] * 40, endless)
            ends = [(started[start].set(), output.outputs[0].finish_reason)[1] async for output in outputs]
            return ends[-1]

        started = {start: asyncio.Event() for start in (1, 2)}
        running = {start: asyncio.create_task(run(start)) for start in (1, 2)}
        await asyncio.gather(*(event.wait() for event in started.values()))
        os.kill(engines.engines[0].pid, signal.SIGKILL)
        ends = await asyncio.gather(*running.values(), return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["EngineDeadError", "str"]
        report = await engines.health()
        assert report.state == "ok" and "1 of 2 replicas make progress; replica 0 is dead" in report.detail
        assert [[o async for o in engines.generate([i], short)][-1].finished for i in range(3)] == [True] * 3

        os.kill(engines.engines[1].pid, signal.SIGKILL)
        with contextlib.suppress(EngineDeadError):
            async for _ in engines.generate([1], endless):
                pass
        assert (await engines.health()).state == "dead"
        with pytest.raises(EngineDeadError):
            await anext(engines.generate([1], short))
