"""Serve several whole engines as one (data parallel), with the interface of ``AsyncEngine``.

Each replica is an ``AsyncEngine`` with a process, ranks and devices of its own. ``router.py`` chooses the replica of a
request. When a replica ends, its streams raise ``EngineDeadError``; streams of the others continue, and new requests go
to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ...text.outputs import RequestOutput
from ..config import EngineConfig
from ..executors.pooling import EmbeddingOutput
from ..scheduling.outputs import SchedulerStats
from ..scheduling.policies.routing import TYPICAL_OUTPUT, Router
from ..scheduling.sampling_params import SamplingParams
from ..scheduling.waiting_queue import QueueFull
from .async_engine import AsyncEngine, EngineDeadError, EngineHealth
from .vllm_arguments import engine_settings

log = logging.getLogger(__name__)


async def start_engines(config: EngineConfig | None = None, **settings: Any) -> AsyncEngine | Replicas:
    """One engine, or as many as ``data_parallel_size`` says. Arguments and errors are those of
    ``AsyncEngine.start``."""
    config = config if config is not None else EngineConfig(**engine_settings(settings))
    return await (AsyncEngine.start(config) if config.replicas == 1 else Replicas.start(config))


def config_of(config: EngineConfig, index: int) -> EngineConfig:
    """The configuration of one replica: its own GPUs, its share of the cores and of a cache's default size, and a
    decision log of its own."""
    threads = config.threads or max(1, config.cpu_threads() // config.ranks)
    file = config.decision_log
    return dataclasses.replace(
        config,
        data_parallel_size=1,
        first_device=config.first_device + index * (config.ranks // config.data_parallel_size),
        threads=threads,
        decision_log=None if file is None else f"{file}.{index}",
    )


class Replicas:
    """Made by ``await Replicas.start(config)``; ended by ``await replicas.shutdown()``."""

    def __init__(self, config: EngineConfig, engines: Sequence[AsyncEngine]) -> None:
        self.config = config
        self.engines = tuple(engines)
        self._router = Router([engine.info.kv_tokens for engine in engines], config.block_size)
        self._where: dict[str, int] = {}
        """The replica of each request that runs."""
        self._counted: dict[int, SchedulerStats] = {}
        """Last statistics of each replica."""
        self._told: set[int] = set()
        """The replicas whose end has been logged."""
        self._closing = False

    @classmethod
    async def start(cls, config: EngineConfig) -> Replicas:
        """Start all replicas at the same time.

        Raises:
            ValueError: the configuration or the model is at fault; the message says what to change.
            EngineDeadError: a replica could not start for another reason.
        """
        starting = [
            asyncio.ensure_future(AsyncEngine.start(config_of(config, index)))
            for index in range(config.data_parallel_size)
        ]
        try:
            engines = await asyncio.gather(*starting)
        except BaseException:
            for each in starting:
                each.cancel()
            for found in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(found, AsyncEngine):
                    await found.shutdown()
            raise
        return cls(config, engines)

    def __getattr__(self, name: str) -> Any:
        """Read an attribute that all replicas share (tokenizer, context length, ...) from the first living one."""
        if name in ("engines", "config"):  # not there yet
            raise AttributeError(name)
        return getattr(self.engines[next(iter(self.alive()), 0)], name)

    def alive(self) -> list[int]:
        """The replicas that have not ended, by number."""
        return [index for index, engine in enumerate(self.engines) if engine.death is None]

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """Does what ``AsyncEngine.stream`` does, on one of the replicas. One whose queue is full passes a request on.

        Raises:
            EngineDeadError: all replicas have ended, or the one that has this request has.
            QueueFull: no replica has room.
        """
        open_ones = self.alive()
        if not open_ones:
            raise EngineDeadError(self.engines[0].death or "all replicas have ended")
        if request_id in self._where:
            raise ValueError(f"request id {request_id!r} is already running: choose another or wait for its end")
        most = params.n * min(params.max_tokens or TYPICAL_OUTPUT, TYPICAL_OUTPUT)
        while True:
            ticket = self._router.send(prompt_token_ids, most, open_ones)
            self._where[request_id] = ticket.engine
            try:
                stream = self.engines[ticket.engine].stream(prompt_token_ids, params, request_id, **options)
                async with contextlib.aclosing(stream) as updates:
                    async for update in updates:
                        self._router.drawn(ticket, len(update.token_ids))
                        yield update
                return
            except QueueFull:  # comes before anything of the request does
                self._router.refused(ticket)
                open_ones = [index for index in self.alive() if index in open_ones and index != ticket.engine]
                if not open_ones:
                    raise
            finally:
                self._router.done(ticket)
                self._where.pop(request_id, None)

    async def generate(
        self, prompt: str | Sequence[int] | Mapping[str, Any], *arguments: Any, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Does what ``AsyncEngine.generate`` does, on one of the replicas."""
        generate = AsyncEngine.generate(self, prompt, *arguments, **options)  # type: ignore[arg-type]
        async with contextlib.aclosing(generate) as outputs:
            async for output in outputs:
                yield output

    def snapshot(self, request_id: str) -> RequestOutput | None:
        """Does what ``AsyncEngine.snapshot`` does, on the replica that has the request."""
        where = self._where.get(request_id)
        return None if where is None else self.engines[where].snapshot(request_id)

    async def embed(
        self, prompt: str | Sequence[int] | Mapping[str, Any], *arguments: Any, **options: Any
    ) -> EmbeddingOutput:
        """Does what ``AsyncEngine.embed`` does, on one of the replicas."""
        return await AsyncEngine.embed(self, prompt, *arguments, **options)  # type: ignore[arg-type]

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is."""
        where = self._where.get(request_id)
        if where is not None:
            await self.engines[where].abort(request_id)

    async def health(self) -> EngineHealth:
        """``ok`` as long as one replica is; the detail names those that are not. Else what the first one says. Logs the
        end of a replica once."""
        self._tell_ends()
        reports = [await engine.health() for engine in self.engines]
        well = sum(report.state == "ok" for report in reports)
        if not well:
            return next((report for report in reports if report.state == "hung"), reports[0])
        if well == len(reports):
            return EngineHealth("ok", f"all {well} replicas make progress")
        ill = [f"replica {i} is {each.state}: {each.detail}" for i, each in enumerate(reports) if each.state != "ok"]
        return EngineHealth("ok", f"{well} of {len(reports)} replicas make progress; {'; '.join(ill)}")

    def _tell_ends(self) -> None:
        alive = len(self.alive())
        for index, engine in enumerate(self.engines):
            if engine.death is not None and alive and index not in self._told and not self._closing:
                self._told.add(index)
                log.error(
                    "transect: error: replica %d has ended (%s), %d of %d go on: restart the server to have it back",
                    *(index, engine.death, alive, len(self.engines)),
                )

    async def stats(self) -> SchedulerStats:
        """The gauges of the replicas that live, and the counters of all: what one that has ended counted last stays, so
        that no counter goes back.

        Raises:
            EngineDeadError: all replicas have ended.
        """
        alive = self.alive()
        found = await asyncio.gather(*(self.engines[index].stats() for index in alive), return_exceptions=True)
        for index, each in zip(alive, found, strict=True):
            if isinstance(each, SchedulerStats):
                self._counted[index] = each
            elif not isinstance(each, EngineDeadError):
                raise each
        living = self.alive()
        if not living:
            raise EngineDeadError(self.engines[0].death or "all replicas have ended")
        return SchedulerStats.sum(
            [each if index in living else each.of_the_past() for index, each in self._counted.items()]
        )

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of finished prompts on all replicas."""
        self._router.forget()
        await asyncio.gather(*(self.engines[index].reset_prefix_cache() for index in self.alive()))

    async def drain(self) -> None:
        """Wait until no request is running on any of them."""
        await asyncio.gather(*(engine.drain() for engine in self.engines))

    async def shutdown(self) -> None:
        """End all replicas."""
        self._closing = True
        await asyncio.gather(*(engine.shutdown() for engine in self.engines))

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()
