"""``Replicas``: several whole engines as one (data parallel). Its interface is that of ``AsyncEngine``.

Each replica is an ``AsyncEngine`` with a process, ranks and devices of its own. ``scheduling/policies/routing.py`` says
which of them gets a request. When one ends or hangs, its requests resume in the others from the tokens that are known,
and ``supervisor.py`` starts it again. Draws are a function of (seed, choice, position), so the rest of an answer is
what it would have been: to the bit where ``numerics.py`` promises it.

A request that ends replicas is replayed at most twice in a row without a token. Its first replay comes at once, with
those of all other requests of the dead replica. The second replay runs alone, because the cause is not known until
then. A token after a replay shows that the request does no harm, and the count is reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from ...checkpoints.peft_config import AdapterFiles
from ...text.output_processor import Update
from ...text.outputs import RequestOutput
from ..config import EngineConfig
from ..scheduling.arrivals import seed_of
from ..scheduling.decisions import DecisionRing
from ..scheduling.outputs import SchedulerStats
from ..scheduling.policies.admission import QueueFull
from ..scheduling.policies.routing import TYPICAL_OUTPUT, Router, Ticket
from ..scheduling.sampling_params import SamplingParams
from . import wire
from .async_engine import AsyncEngine
from .client import EngineClient
from .inputs import check_params
from .streams import EngineDeadError, EngineHealth, OutputStream
from .supervisor import Supervisor
from .vllm_arguments import engine_settings

MOST_REPLAYS = 2
"""Largest number of replays of a request without a token between them; the last replay runs alone."""
REPORT = 16
"""Tokens of a stream between two reports to the router."""
PAST_LOGS = 4
"""Ended replicas whose decisions are kept, for the bills of requests that they had."""
RECENT_CHOICES = 64
MOST_DEATHS = 10
"""Largest number of replicas that may end while running one request, even with tokens between."""


async def start_engines(
    config: EngineConfig | None = None, *, replaceable: bool = False, **settings: Any
) -> AsyncEngine | Replicas:
    """Start one engine, or ``data_parallel_size`` of them. Arguments and errors are those of ``AsyncEngine.start``.

    Args:
        replaceable: a single engine is one replica too, which ``reload`` can replace; not where groups share experts.
    """
    config = config if config is not None else EngineConfig(**engine_settings(settings))
    single = config.replicas == 1 and (config.enable_expert_parallel or not replaceable)
    return await (AsyncEngine.start(config) if single else Replicas.start(config))


def config_of(config: EngineConfig, index: int) -> EngineConfig:
    """Derive the configuration of one replica: its GPUs, its share of the cores and of a cache's default size, and its
    own decision log, which has the given name if there is one replica."""
    threads = config.threads or max(1, config.cpu_threads(served=True) // config.ranks)
    file = config.decision_log
    return dataclasses.replace(
        config,
        data_parallel_size=1,
        first_device=config.first_device + index * (config.ranks // config.data_parallel_size),
        threads=threads,
        decision_log=file if file is None or config.replicas == 1 else f"{file}.{index}",
        hung_after_s=config.silence_s,
    )


@dataclasses.dataclass(slots=True)
class _Place:
    """The replica that runs a request."""

    engine: AsyncEngine
    ticket: Ticket
    alone: bool
    """True if the request holds ``Replicas._alone``."""
    approximate: bool = False
    """True if the request continues tokens of an engine with other bits."""
    silent: bool = True
    """True until a token of the request arrives from this replica."""
    report_at: int = 1
    """Number of tokens at the next report to the router: the first token is reported at once, because the prompt is
    done then."""


class Replicas(EngineClient):
    """Made by ``await Replicas.start(config)``; ended by ``await replicas.shutdown()``."""

    def __init__(self, config: EngineConfig, engines: Sequence[AsyncEngine]) -> None:
        self.config = config
        self.engines = list(engines)
        more = {"slots": config.max_loras} if config.enable_lora else {}
        self._router = Router([engine.info.kv_tokens for engine in engines], config.block_size, **more)
        self._streams: dict[str, OutputStream] = {}
        """The requests that have not ended."""
        self._where: dict[str, AsyncEngine] = {}
        """Replica of each request that is assigned to one."""
        self._counted: dict[AsyncEngine, SchedulerStats] = {}
        """The last statistics of each replica, ended ones included."""
        self._supervisor: Supervisor | None = None
        """The supervisor; None before ``start`` has made it, when replicas that end are not restarted."""
        self._change = asyncio.Event()
        """Set, and replaced, when a replica or the state of a waiting stream has changed."""
        self._alone = asyncio.Lock()
        """Lock held by a request that has ended two replicas, until a token of it arrives."""
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._count = 0
        self._closing = False
        self.past_decisions: deque[DecisionRing] = deque(maxlen=PAST_LOGS)
        """Decisions of replicas that were replaced."""
        self.routed: deque[tuple[str, str, Ticket]] = deque(maxlen=RECENT_CHOICES)
        """Request, client and ticket of the router's newest choices."""
        self.num_routed = 0
        self.handed_over = 0
        """Count of hand-overs of requests to another replica."""

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
        replicas = cls(config, engines)
        replicas._supervisor = Supervisor(
            replicas.engines,
            lambda index: AsyncEngine.start(config_of(replicas.config, index)),
            config.silence_s if config.fail_over and len(engines) > 1 else None,
            replicas._replaced,
        )
        return replicas

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that all replicas share (tokenizer, context length, ...) from the first living one."""
        if name in ("engines", "config"):  # not there yet
            raise AttributeError(name)
        return getattr(self.engines[next(iter(self.alive()), 0)], name)

    @property
    def info(self) -> wire.Ready:
        """The ``Ready`` message of the first living replica."""
        return self.engines[next(iter(self.alive()), 0)].info

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.engines[next(iter(self.alive()), 0)].max_model_len

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's files recommend."""
        return self.engines[0].default_sampling_params()

    def alive(self) -> list[int]:
        """List the replicas that have not ended, by number."""
        return [index for index, engine in enumerate(self.engines) if engine.death is None]

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Update, None]:
        """Stream like ``AsyncEngine.stream`` from one of the replicas, and continue on another if that one ends. A
        replica whose queue is full passes the request on.

        Raises:
            EngineDeadError: all replicas have ended for good, or this request has ended several.
            QueueFull: no replica has room.
        """
        self._check_new(request_id)
        params = check_params(params)
        if params.seed is None:  # an answer that is continued elsewhere needs the seed of its first engine
            params = params.with_(seed=seed_of(self._seed, self._count))
        self._count += 1
        first = self.engines[(await self._living())[0]]
        stream = first.open(prompt_token_ids, params, request_id, **options)
        self._check_new(request_id)
        self._streams[request_id] = stream
        try:
            full: set[AsyncEngine] = set()
            while stream.left:
                while stream.aborted:
                    for update in self.engines[0].end(stream, stream.aborted.pop(0)):
                        stream.mailbox.put(update)
                if len(stream.mailbox):
                    for item in await stream.take():
                        if isinstance(item, Update):
                            stream.left -= item.finished
                            yield item
                    continue
                try:
                    async with self._placed(stream, full) as place:
                        if place is None:
                            continue
                        ticket, drawn = place.ticket, 0
                        async with contextlib.aclosing(place.engine.follow(stream)) as updates:
                            async for update in updates:
                                drawn += 0 if update.given else len(update.token_ids)
                                if place.silent and drawn:
                                    self._begin_news(place, stream, update)
                                if drawn >= place.report_at:
                                    self._router.drawn(ticket, drawn)
                                    drawn, place.report_at = 0, REPORT
                                yield update
                except EngineDeadError as error:
                    self._check_replay(stream, str(error))
        finally:
            del self._streams[request_id]

    def _check_new(self, request_id: str) -> None:
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is already running: choose another or wait for its end")

    @contextlib.asynccontextmanager
    async def _placed(self, stream: OutputStream, full: set[AsyncEngine]) -> AsyncIterator[_Place | None]:
        """Assign a replica to a request, which counts there while the context is entered; None if the request was
        aborted meanwhile. ``full``: replicas that have refused it."""
        params = stream.params
        most = params.n * min(params.max_tokens or TYPICAL_OUTPUT, TYPICAL_OUTPUT)
        alone = stream.deaths >= MOST_REPLAYS
        if alone:
            await self._alone.acquire()
        place: _Place | None = None
        try:
            living = await self._living(stream)
            if stream.aborted:
                yield None
                return
            open_ones = [index for index in living if self.engines[index] not in full] or living
            given = stream.options
            named = {} if given.adapter is None else {"adapter": given.adapter.id}
            ticket = self._router.send(stream.prompt_token_ids, most, open_ones, session=given.session, **named)
            self.num_routed += 1
            self.routed.append((stream.request_id, given.client, ticket))
            engine = self._where[stream.request_id] = self.engines[ticket.engine]
            place, alone = _Place(engine, ticket, alone), False
            try:
                place.approximate = self._moved_to(engine, stream)
                yield place
            except QueueFull:  # comes before anything of the request does
                self._router.refused(ticket)
                full.add(engine)
                if all(self.engines[index] in full for index in self.alive()):
                    raise
            finally:
                self._router.done(ticket)
                del self._where[stream.request_id]
        finally:
            if alone or (place is not None and place.alone):
                self._alone.release()

    def _begin_news(self, place: _Place, stream: OutputStream, update: Update) -> None:
        """Record the first token of a request from a replica: the request was not the cause of the earlier replica's
        end."""
        place.silent, update.approximate = False, place.approximate
        stream.deaths = 0
        if place.alone:
            place.alone = False
            self._alone.release()

    def _moved_to(self, engine: AsyncEngine, stream: OutputStream) -> bool:
        """Record the new replica of a stream. Returns True if the stream has tokens of an engine whose bits the new one
        does not promise."""
        before, stream.engine = stream.engine, engine
        if before is None or not stream.begun:
            return False
        self.handed_over += 1
        if not stream.num_tokens or engine.info.numerics.promises(before.info.numerics):
            return False
        if engine.vocab_size != before.vocab_size:
            raise ValueError("the answer's replica has ended, and the others have another model: send it again")
        return True

    def _check_replay(self, stream: OutputStream, reason: str) -> None:
        """Check that a stream whose replica has ended may be replayed.

        Raises:
            EngineDeadError: it is not.
        """
        supervisor = self._supervisor
        if self._closing or supervisor is None:
            raise EngineDeadError(reason)
        if stream.engine is not None and stream.engine.retired:  # killed because its time was over
            if stream.num_tokens and not self.info.numerics.promises(stream.engine.info.numerics):
                raise EngineDeadError(reason)
            return
        if not supervisor.restarts:
            raise EngineDeadError(reason)
        stream.deaths += 1
        stream.all_deaths += 1
        if stream.deaths > MOST_REPLAYS or stream.all_deaths > MOST_DEATHS:
            raise EngineDeadError(
                f"{stream.all_deaths} replicas have ended with this request, the last one because {reason}: it is not "
                "replayed again; shorten or change it, or send it again if others were the cause"
            )

    async def _living(self, stream: OutputStream | None = None) -> list[int]:
        """List the living replicas; if there is none, wait for one that is being started, unless ``stream`` is aborted.

        Raises:
            EngineDeadError: all have ended for good.
        """
        while not (living := self.alive()):
            supervisor = self._supervisor
            if self._closing or supervisor is None or not supervisor.hopes:
                raise EngineDeadError(self.engines[0].death or "all replicas have ended")
            if stream is not None and stream.aborted:
                return []
            await self._change.wait()
        return living

    def _replaced(self, index: int, old: AsyncEngine | None) -> None:
        """Record that an engine has replaced ``old``, or, if ``old`` is None, that none could."""
        if old is not None:
            self.past_decisions.append(old.decisions)
            self._router.renew(index, self.engines[index].info.kv_tokens)
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def snapshot(self, request_id: str) -> RequestOutput | None:
        """Return the current state of a request from its replica, like ``AsyncEngine.snapshot``."""
        where = self._where.get(request_id)
        return None if where is None else where.snapshot(request_id)

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, on its replica or between two replicas."""
        where, stream = self._where.get(request_id), self._streams.get(request_id)
        if where is not None:
            await where.abort(request_id, choice)
        elif stream is not None:
            stream.aborted.append(choice)
            self._wake()

    # ---- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Report the state of all replicas: ``ok`` if one is ok, with the others in the detail; ``hung`` while all are
        being restarted; else the state of the first."""
        reports = [await engine.health() for engine in self.engines]
        if len(reports) == 1:
            return reports[0]
        pids = tuple(pid for report in reports for pid in report.pids)
        well = sum(report.state == "ok" for report in reports)
        ill = [f"replica {i} is {each.state}: {each.detail}" for i, each in enumerate(reports) if each.state != "ok"]
        if well == len(reports):
            return EngineHealth("ok", f"all {well} replicas make progress", pids)
        if well:
            return EngineHealth("ok", f"{well} of {len(reports)} replicas make progress; {'; '.join(ill)}", pids)
        if self._supervisor is not None and self._supervisor.hopes and not self._closing:
            return EngineHealth("hung", f"no replica makes progress, and they are started again; {'; '.join(ill)}")
        return next((report for report in reports if report.state == "hung"), reports[0])

    async def stats(self) -> SchedulerStats:
        """Return the gauges of the living replicas, and the counters of all: the last counts of ended ones are kept, so
        that no counter decreases.

        Raises:
            EngineDeadError: all replicas have ended.
        """
        living = [engine for engine in self.engines if engine.death is None]
        found = await asyncio.gather(*(engine.stats() for engine in living), return_exceptions=True)
        for engine, each in zip(living, found, strict=True):
            if isinstance(each, SchedulerStats):
                self._counted[engine] = each
            elif not isinstance(each, EngineDeadError):
                raise each
        if not self.alive():
            raise EngineDeadError(self.engines[0].death or "all replicas have ended")
        return SchedulerStats.sum(
            [each if engine.death is None else each.of_the_past() for engine, each in self._counted.items()]
        )

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix caches of all replicas."""
        self._router.forget()
        await asyncio.gather(*(self.engines[index].reset_prefix_cache() for index in self.alive()))

    async def load_adapter(self, files: AdapterFiles) -> None:
        """Load an adapter as ``AsyncEngine.load_adapter`` does, on all living replicas."""
        await asyncio.gather(*(self.engines[index].load_adapter(files) for index in await self._living()))

    async def forget_adapter(self, files: AdapterFiles) -> None:
        """Let the replicas forget an adapter that no request has."""
        await asyncio.gather(*(self.engines[index].forget_adapter(files) for index in self.alive()))

    async def reload(self, config: EngineConfig | None = None, drain_s: float = 60.0) -> None:
        """Replace all replicas, with another configuration or changed weights, without dropping a stream: each old one
        finishes its streams once the new one takes requests. Streams that last longer than ``drain_s`` seconds continue
        in a new replica if its bits are the same, and end with an error otherwise.

        Raises:
            ValueError: the new configuration or model is at fault; the old ones keep running.
            EngineDeadError: a replica could not be started for another reason; the old ones keep running.
        """
        assert self._supervisor is not None
        if config is not None and config.data_parallel_size != len(self.engines):
            raise ValueError(
                f"data_parallel_size is {len(self.engines)} and cannot become {config.data_parallel_size} while the "
                "server runs: restart it"
            )
        before, self.config = self.config, config or self.config
        try:
            await self._supervisor.replace(drain_s)
        except BaseException:
            self.config = before
            raise

    async def drain(self) -> None:
        """Wait until no replica runs a request."""
        while self._streams:
            await asyncio.gather(*(engine.drain() for engine in self.engines))
            await asyncio.sleep(0.01)

    async def shutdown(self) -> None:
        """End all replicas."""
        self._closing = True
        self._wake()
        if self._supervisor is not None:
            await self._supervisor.close()
        await asyncio.gather(*(engine.shutdown() for engine in self.engines))

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()
