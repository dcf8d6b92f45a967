"""``RemoteReplicas``: replicas on any machine as one engine. They dial in, and leave, while requests run.

It is ``Replicas`` with places that come and go: the router, the fail-over and the checks are those of one machine
(``engine/frontends/replicas.py``). Who starts replicas, and starts them again, is not decided here: Ray, Kubernetes,
systemd, or a shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import time
from typing import Any

from ..checkpoints.resolve import resolve
from ..engine.executors.pooling import default_pooling
from ..engine.frontends.async_engine import AsyncEngine
from ..engine.frontends.looks import looks
from ..engine.frontends.replicas import Replicas
from ..engine.frontends.streams import EngineDeadError, EngineHealth, OutputStream
from ..engine.scheduling.outputs import SchedulerStats
from ..engine.scheduling.policies.scaling import Seen
from ..server.operations.request_log import note
from ..text.model_text import ModelText, load_text, text_settings
from . import links
from .links import LinkError
from .metrics import FleetCollector, routes
from .paces import Paces
from .remote_engine import RemoteEngine
from .scaling import Decider
from .settings import FleetSettings

log = logging.getLogger(__name__)

MEET_S = 60.0
"""Seconds for the engine of an accepted replica to answer."""
REPORT_S = 1.0
"""Seconds between two reports of its load to a replica."""
SHORTEST_BUSY_S = 0.1
"""Busy seconds between two reports from which a rate is computed."""
RATE_MEMORY = 0.999
"""Share of the highest measured rate that is kept at each report."""


class RemoteReplicas(Replicas):
    """Made by ``await RemoteReplicas.open(settings)``; ended by ``await fleet.shutdown()``."""

    def __init__(self, settings: FleetSettings, text: ModelText, pooling: Any) -> None:
        super().__init__(settings.engine, [])
        self.settings = settings
        self._text, self._pooling = text, pooling
        self._key = settings.key()
        self._server: asyncio.Server | None = None
        self._supervisor: Any = self  # replicas are started again elsewhere; see ``restarts`` and ``hopes``
        self._watching: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._alone_since = time.monotonic()
        """Time since which there has been no replica."""
        self._rates: dict[AsyncEngine, _Rate] = {}
        self._paces = Paces()
        self._past: Any = _Past()
        """Key of the sum of all replaced engines in ``_counted``."""
        self._counted_at, self._counted_before = time.monotonic(), 0
        self.rate = 0.0
        """Requests per second between the last two reports."""
        self.refused = 0
        """Count of links that were refused."""
        self.began = time.monotonic()
        self.collectors = (FleetCollector(self),)
        """Metrics that the server shows besides its own."""
        self.routes = (routes,)
        """Routes that the server has besides its own."""

    @classmethod
    async def open(cls, settings: FleetSettings, sock: socket.socket | None = None) -> RemoteReplicas:
        """Listen for replicas, and wait for the first one. The decisions about their number are written to the log; the
        program that starts replicas reads them as the metric ``transect_fleet_wanted_replicas``.

        Args:
            settings: of the fleet.
            sock: bound socket for links; None to bind ``links.host`` and ``links.port``.

        Raises:
            ValueError: the settings or the model are at fault.
            EngineDeadError: no replica came within ``replicas.start_timeout_s``.
        """
        fleet = await cls.listen(settings, sock)
        try:
            async with asyncio.timeout(settings.replicas.start_timeout_s):
                await fleet.first()
        except TimeoutError:
            await fleet.shutdown()
            raise EngineDeadError(f"no replica came within {settings.replicas.start_timeout_s:g} s") from None
        except BaseException:
            await fleet.shutdown()
            raise
        fleet._leaving.add(asyncio.create_task(fleet._decide(Decider.of(settings))))
        return fleet

    @classmethod
    async def listen(cls, settings: FleetSettings, sock: socket.socket | None = None) -> RemoteReplicas:
        """Listen for replicas without waiting for one. Arguments and errors are those of ``open``."""
        config, own = settings.engine, settings.links
        find = functools.partial(resolve, config.model, load_format=config.load_format, revision=config.revision)
        source = await asyncio.to_thread(find)
        text = await asyncio.to_thread(functools.partial(load_text, source, **text_settings(config)))
        fleet = cls(settings, text, default_pooling(source.path))
        tls = None
        if own.ssl_certfile is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(own.ssl_certfile, own.ssl_keyfile)
        place = {"sock": sock} if sock is not None else {"host": own.host, "port": own.port}
        try:
            fleet._server = await asyncio.start_server(fleet._accept, ssl=tls, **place)  # type: ignore[call-overload]
        except OSError as error:
            raise ValueError(
                f"cannot listen for replicas on {own.host}:{own.port} ({error.strerror}): change links.host or "
                "links.port"
            ) from None
        fleet._watching = asyncio.create_task(fleet._watch())
        fleet._reporting = asyncio.create_task(fleet._report())
        return fleet

    @property
    def port(self) -> int:
        """Port on which replicas dial in."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    # ---- what ``Replicas`` asks of a supervisor ----------------------------------------------------------------------

    restarts = True

    @property
    def hopes(self) -> bool:
        """True while a replica is here, or may come in time for requests that wait."""
        return bool(self.alive()) or time.monotonic() - self._alone_since < self.settings.links.wait_s

    async def close(self) -> None:
        """Stop to listen and to watch."""
        if self._server is not None:
            self._server.close()
        tasks = [*filter(None, [self._watching, self._reporting]), *self._handshakes, *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reload(self, config: Any = None, drain_s: float = 60.0) -> None:
        """Refuse: replicas are replaced by the program that starts them.

        Raises:
            ValueError: always.
        """
        raise ValueError("a fleet's replicas are replaced by `transect cluster roll`, not by a reload of the router")

    # ---- replicas that come and go -----------------------------------------------------------------------------------

    def alive(self) -> list[int]:
        """List the replicas that take requests, by number."""
        return [index for index, each in enumerate(self.engines) if each.death is None and not each.retired]

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self._text.tokenizer

    @property
    def chat_template(self) -> Any:
        """Chat template of the model; None if there is none."""
        return self._text.chat_template

    @property
    def sampling_defaults(self) -> Any:
        """Sampling parameters that the model's files recommend."""
        return self._text.defaults

    def _moved_to(self, engine: AsyncEngine, stream: OutputStream) -> bool:
        before = getattr(stream.engine, "name", "")
        note(replica=",".join(filter(None, (before, getattr(engine, "name", "")))))
        return super()._moved_to(engine, stream)

    async def first(self) -> None:
        """Wait for the first replica."""
        while not self.engines:
            await self._change.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        peer = (writer.get_extra_info("peername") or ("?",))[0]
        try:
            link = await links.accept(reader, writer, self._key)
            async with asyncio.timeout(MEET_S):
                engine = await RemoteEngine.meet(self.config, self._text, self._pooling, link, self._heard)
        except (LinkError, EngineDeadError, ValueError, TimeoutError) as error:
            self.refused += 1
            log.warning("transect: fleet: no replica from %s: %s", peer, error)
            return
        self._join(engine)

    def _join(self, engine: RemoteEngine) -> None:
        name = engine.name
        for each in self.engines:
            if isinstance(each, RemoteEngine) and each.name == name and each.death is None:
                each.kill(f"replica {name} has dialled in again")
        place = next((index for index, each in enumerate(self.engines) if each.death is not None), None)
        if place is None:
            place = self._router.add(engine.info.kv_tokens)
            self.engines.append(engine)
            self._wake()
        else:
            old, self.engines[place] = self.engines[place], engine
            self._rates.pop(old, None)
            self._paces.forget(old)
            self._fold(old)
            self._replaced(place, old)
        log.warning("transect: fleet: replica %s is ready (place %d, generation %d)", name, place, engine.generation)

    def _fold(self, old: AsyncEngine) -> None:
        """Keep the counts of a replaced engine in one sum, so that nothing else of it is kept."""
        known = [self._counted.pop(each).of_the_past() for each in (old, self._past) if each in self._counted]
        if known:
            self._counted[self._past] = SchedulerStats.sum(known)

    def _heard(self, engine: RemoteEngine, message: links.Message) -> None:
        """Take a message of a replica's host."""
        if isinstance(message, links.Retiring) and not engine.retired:
            engine.retired = True
            log.warning("transect: fleet: replica %s leaves, and finishes its streams", engine.name)
            self._wake()
            task = asyncio.create_task(self._drain_one(engine))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _drain_one(self, engine: RemoteEngine) -> None:
        await engine.drain()
        engine.link.say(links.Drained())

    async def _watch(self) -> None:
        """Cut links that are silent for too long, and let waiting requests know when there is no hope."""
        quiet: dict[AsyncEngine, tuple[float, float]] = {}
        known: set[AsyncEngine] = set()
        async for passed in looks():
            for engine in self.engines:
                if engine.death is None and isinstance(engine, RemoteEngine):
                    heard, silent = quiet.get(engine, (engine.link.heard, 0.0))
                    silent = 0.0 if heard != engine.link.heard else silent + passed
                    quiet[engine] = engine.link.heard, silent
                    if silent > self.settings.links.lost_after_s:
                        engine.kill(f"replica {engine.name} gave no sign of life for {silent:.1f} s")
                elif engine not in known:
                    known.add(engine)
                    quiet.pop(engine, None)
                    log.error("transect: fleet: replica %s is gone: %s", getattr(engine, "name", "?"), engine.death)
            known &= set(self.engines)
            quiet = {engine: seen for engine, seen in quiet.items() if engine in self.engines}
            if self.alive():
                self._alone_since = time.monotonic()
            elif not self.hopes:
                self._wake()

    async def _report(self) -> None:
        """Tell each replica its load once a second."""
        while True:
            await asyncio.sleep(REPORT_S)
            now = time.monotonic()
            self.rate = (self._count - self._counted_before) / max(1e-3, now - self._counted_at)
            self._counted_at, self._counted_before = now, self._count
            await asyncio.gather(*(self._report_to(index, engine) for index, engine in enumerate(self.engines)))

    async def _report_to(self, index: int, engine: AsyncEngine) -> None:
        if engine.death is None and isinstance(engine, RemoteEngine):
            with contextlib.suppress(EngineDeadError):
                try:
                    async with asyncio.timeout(REPORT_S):
                        engine.link.say(self._load(index, engine, await engine.stats()))
                except TimeoutError:  # a long step
                    engine.link.say(links.Heartbeat())

    async def _decide(self, decider: Decider) -> None:
        wanted = decider.least
        while True:
            try:
                seen = await self.seen()
            except EngineDeadError:
                seen = None
            wanted = decider.decide(time.time(), seen, wanted).replicas
            await asyncio.sleep(decider.interval_s)

    def _load(self, index: int, engine: AsyncEngine, stats: SchedulerStats) -> links.LoadReport:
        rate = self._rates.setdefault(engine, _Rate(stats))
        if (measured := rate.learn(stats)) is not None:
            self._paces.learn(engine, *measured)
            self._router.weigh(index, self._paces.pace(engine))
        waiting, running = stats.waiting + stats.preempted, stats.running
        return links.LoadReport(self._router.load(index), waiting, running, stats.kv_usage, rate.highest, self.rate)

    # ---- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Report ``ok`` while a replica takes requests, else ``hung``: others may come."""
        places = [engine for engine in self.engines if engine.death is None]
        pids = tuple(engine.pid for engine in places)
        ready = len(self.alive())
        leaving = f", {len(places) - ready} leave" if len(places) > ready else ""
        if ready:
            return EngineHealth("ok", f"{ready} replicas take requests{leaving}", pids)
        return EngineHealth("hung", f"no replica takes requests{leaving}", pids)

    async def stats(self) -> SchedulerStats:
        """Return the sums over all replicas; zeros and past counts while there is none."""
        if not self.alive():
            past = [each.of_the_past() for each in self._counted.values()]
            if not past:
                raise EngineDeadError("no replica takes requests")
            return SchedulerStats.sum(past)
        return await super().stats()

    async def seen(self, starting: int = 0) -> Seen:
        """Return the state of the fleet as a scaling policy sees it.

        Raises:
            EngineDeadError: no replica answers.
        """
        stats = await self.stats()
        ready = self.alive()
        rates = [each.highest for engine, each in self._rates.items() if each.highest and engine.death is None]
        queued = sum(self._router.load(index) for index in ready)
        waiting = stats.waiting + stats.preempted
        mean = sum(rates) / len(rates) if rates else 0.0
        kv = stats.kv_blocks_used / max(1, stats.kv_blocks_total)
        return Seen(time.monotonic(), len(ready), starting, waiting, stats.running, kv, self.rate, queued, mean)

    def replicas(self) -> list[dict[str, Any]]:
        """List the replicas for ``transect cluster status``."""
        return [
            {
                "name": engine.name,
                "generation": engine.generation,
                "state": "gone" if engine.death is not None else "leaving" if engine.retired else "ready",
                "detail": engine.death or "",
                "queued_tokens": self._router.load(index),
                "pace": self._router.pace(index),
                "tokens_per_s": round(self._rates[engine].highest, 1) if engine in self._rates else 0.0,
                "streams": len(engine._streams),
                "pid": engine.pid,
            }
            for index, engine in enumerate(self.engines)
            if isinstance(engine, RemoteEngine)
        ]


class _Past:
    """All engines that have been replaced."""

    death = "it was replaced"


class _Rate:
    """Highest rate of a replica in tokens per second, with a slow decay. Prompt tokens from the cache do not count."""

    def __init__(self, stats: SchedulerStats) -> None:
        self.highest = 0.0
        """Tokens per second while the replica is busy; 0 before it was."""
        self._before, self._at = stats, time.monotonic()

    def learn(self, stats: SchedulerStats) -> tuple[int, int, float] | None:
        """Take the newest statistics. Returns the steps, tokens and busy seconds since the last ones; None if they are
        too few to tell a rate."""
        before, now = self._before, time.monotonic()
        tokens = self._computed(stats) - self._computed(before)
        steps, seconds = stats.timed_steps - before.timed_steps, stats.step_seconds - before.step_seconds
        if stats.timed_steps == before.timed_steps and before.running and stats.running:
            steps, seconds = stats.steps - before.steps, now - self._at  # steps without times
        self._before, self._at = stats, now
        if seconds <= SHORTEST_BUSY_S or tokens <= 0 or steps <= 0:
            return None
        self.highest = max(tokens / seconds, RATE_MEMORY * self.highest)
        return steps, tokens, seconds

    @staticmethod
    def _computed(stats: SchedulerStats) -> int:
        return stats.prompt_tokens - stats.prefix_hit_tokens + stats.generation_tokens
