"""A search whose replica is killed in the middle has the same tree. The engines are processes without a model."""

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
import stub_engine
from effort import proving
from search_runs import tree_of
from tiny_llm import save_tiny_llm

from transect import SamplingParams, Search
from transect.engine.config import EngineConfig
from transect.engine.frontends.async_engine import AsyncEngine
from transect.engine.frontends.replicas import Replicas
from transect.search.machine import SearchRun
from transect.search.streams import follow
from transect.search.tree import Tree

PROMPT = list(range(65, 85))
SEARCHES = {
    "majority": Search("majority", n=6, budget=180),
    "adaptive": Search("adaptive", n=12, extract="number"),
    "beam": Search("beam", n=6, width=2, step="a", step_tokens=12, steps=4),
    "confident": Search("confident", n=9, warmup=3, window=4, keep=0.7),
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    save_tiny_llm(tmp_path)
    monkeypatch.setattr(AsyncEngine, "process_module", "stub_engine")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(stub_engine.__file__).parent), "src"]))
    monkeypatch.setenv("STUB_STEP_S", "0.002")
    return lambda: Replicas.start(EngineConfig(model=str(tmp_path), data_parallel_size=2))


class Engines:
    """The operations of one search in replicas, which a test may kill."""

    def __init__(self, engines, name):
        self.engines, self.name, self.seen = engines, name, 0
        self.kill_at = -1

    async def submit(self, operation):
        stream = self.engines.stream(operation.prompt_token_ids, operation.params, f"{self.name}-{operation.key}")
        async with contextlib.aclosing(stream) as updates:
            async for update in updates:
                self.seen += 1
                having = self.engines._where.get(f"{self.name}-{operation.key}")  # none after the last token
                if self.seen >= self.kill_at >= 0 and having is not None and len(self.engines.alive()) == 2:
                    os.kill(having.pid, signal.SIGKILL)
                    self.kill_at = -1
                yield update

    async def abort(self, key, choice):
        await self.engines.abort(f"{self.name}-{key}", choice)


async def search(engines, name, kill_at=-1):
    params = SamplingParams(max_tokens=30, seed=4)
    run = SearchRun(
        SEARCHES[name], Tree(None, "question"), PROMPT, params, seed=1, max_model_len=4096,
        decode=lambda ids: bytes(ids).decode(),
    )  # fmt: skip
    driver = Engines(engines, f"{name}-{kill_at}")
    driver.kill_at = kill_at
    async for _ in follow(run, driver):
        pass
    return tree_of(run), driver.seen


async def test_a_search_whose_replica_is_killed_has_the_same_tree(start):
    rng = random.Random(7)
    async with await start() as engines:
        whole = {name: await search(engines, name) for name in SEARCHES}
        for _ in range(20 if proving() else 1):
            for name, (tree, updates) in whole.items():
                async with asyncio.timeout(60):
                    while len(engines.alive()) < 2:
                        await asyncio.sleep(0.01)
                before = engines.handed_over
                while engines.handed_over == before:  # on a busy machine a kill may come after the last token
                    found, _ = await search(engines, name, rng.randint(1, updates // 2))
                    assert found == tree, name
        assert (await engines.stats()).running == 0, "no branch is left"


@pytest.mark.prove
async def test_a_dropped_choice_is_dropped_where_its_request_goes_on(start):
    """While no replica runs, a choice is aborted; the other choices of the request come from the next replica."""
    async with await start() as engines:
        ended = {}

        async def follow_all():
            async for update in engines.stream(PROMPT, SamplingParams(n=3, max_tokens=200, seed=4), "a"):
                if update.finish_reason is not None:
                    ended[update.index] = update.finish_reason
                if update.index == 0 and not ended and len(engines.alive()) == 2:
                    for engine in engines.engines:
                        os.kill(engine.pid, signal.SIGKILL)

        task = asyncio.create_task(follow_all())
        async with asyncio.timeout(60):
            while engines.alive():
                await asyncio.sleep(0.001)
            await engines.abort("a", 1)
            await task
        assert ended == {0: "length", 1: "abort", 2: "length"}
