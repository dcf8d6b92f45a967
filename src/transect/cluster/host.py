"""``Host``: one replica of a fleet on its machine: the engine process, and the link to the router.

The engine's messages pass unread between the process and the link. The supervisor of ``transect serve`` watches the
process: one that hangs or ends is started again, here, without asking anyone. When the router is gone, the host dials
until there is one; the engine drops the requests of the old one and keeps its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable

import msgspec
import zmq

from ..engine.frontends import wire
from ..engine.frontends.async_engine import STOP_WAIT_S, AsyncEngine, ended_how
from ..engine.frontends.launch import Launched, launch
from ..engine.frontends.streams import EngineDeadError
from ..engine.frontends.supervisor import Supervisor
from . import links
from .links import FleetLink, LinkError
from .settings import FleetSettings

log = logging.getLogger(__name__)

REDIAL_S, LONGEST_REDIAL_S = 0.1, 2.0
"""Seconds between two attempts to reach the router: at first, and at most."""

SILENT_REPORTS = 5.0
"""Seconds beyond ``lost_after_s`` for which a router, which reports every second, may be silent."""

Find = Callable[[], Awaitable[tuple[str, int]]]


class Relay:
    """An engine process of this machine, whose messages go to the linked router. It has the part of ``AsyncEngine``
    that ``Supervisor`` uses."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self.death: str | None = None
        self.heard = time.monotonic()
        self.served = False
        self.retired = False
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        """Result of the newest wait for ``Ready``."""
        self._link: FleetLink | None = None
        """Link of the router that has the engine."""
        self._next: FleetLink | None = None
        """Link of a router that gets the engine with its next ``Ready``."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._wait())]

    @classmethod
    async def start(cls, settings: FleetSettings) -> Relay:
        """Start an engine, and wait until it takes requests.

        Raises:
            ValueError: the settings or the model are at fault.
            EngineDeadError: it could not start for another reason.
        """
        relay = cls(await launch(settings.engine, settings.replicas.engine_module))
        try:
            relay.info = await relay._ready
        except BaseException:
            await relay.shutdown()
            raise
        relay._launched.connected()
        return relay

    info: wire.Ready

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._launched.process.pid

    def kill(self, reason: str) -> None:
        """Kill the engine process."""
        self._die(reason)
        with contextlib.suppress(ProcessLookupError):
            self._launched.process.kill()

    async def shutdown(self) -> None:
        """End the engine process. May be called repeatedly."""
        self._die("it was shut down")
        process = self._launched.process
        if process.returncode is None:
            with contextlib.suppress(Exception):
                await self._launched.socket.send(wire.encode(wire.Shutdown()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_WAIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._launched.abandon()

    async def carry(self, link: FleetLink, heard: Callable[[links.Message], None]) -> None:
        """Pass messages between the engine and a router until one of them is gone.

        Raises:
            LinkError: the router is gone.
            EngineDeadError: the engine has ended.
        """
        self._ready, self._next = asyncio.get_running_loop().create_future(), link
        try:
            await self._send(wire.encode(wire.NewCaller()))
            await self._ready
            while True:
                kind, data = await link.receive()
                if kind == links.LINK:
                    heard(links.read(data))
                elif self.death is not None:
                    raise EngineDeadError(self.death)
                else:
                    self.served = True
                    await self._send(data)
        finally:
            self._link = self._next = None

    async def _send(self, data: bytes) -> None:
        try:
            await self._launched.socket.send(data)
        except (asyncio.CancelledError, zmq.ZMQError):  # the socket was closed, or this task is cancelled
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EngineDeadError(self.death or "its socket was closed") from None

    async def _read(self) -> None:
        socket = self._launched.socket
        while True:
            data = await socket.recv()
            self.heard = time.monotonic()
            if self._link is not None:
                self._link.put(links.ENGINE, data)
            elif not self._ready.done():
                message = wire.decode_from_engine(data)
                if isinstance(message, wire.Ready):
                    self._ready.set_result(message)
                    if self._next is not None:  # at once: a message may arrive before ``_ready`` is awaited
                        self._link, self._next = self._next, None
                        self._link.put(links.ENGINE, data)
                elif isinstance(message, wire.Failed):
                    self._ready.set_exception((ValueError if message.user_error else EngineDeadError)(message.message))

    async def _wait(self) -> None:
        code = await self._launched.process.wait()
        await asyncio.sleep(0.02)  # its last words may still be under way
        self._die(f"the engine process {ended_how(code)}")

    def _die(self, reason: str) -> None:
        if self.death is None:
            self.death = reason
            if not self._ready.done():
                self._ready.set_exception(EngineDeadError(reason))
                self._ready.exception()  # retrieved, also if nobody waits
            if self._link is not None:
                self._link.say(links.EngineEnded(reason))
                self._link.close()


class Host:
    """One replica. Made by ``await Host.start(...)``; ended by ``await host.retire()``.

    Args:
        settings: of the fleet.
        name: of this replica, unique in the fleet.
        find: returns the router's address; called before each attempt to reach it.
        generation: number of the roll that starts it.
    """

    def __init__(self, settings: FleetSettings, name: str, find: Find, generation: int = 0) -> None:
        self.settings, self.name, self._find, self._generation = settings, name, find, generation
        self._engines: list[Relay] = []
        self._key = settings.key()
        self._tls = None
        if settings.links.ssl_ca_file is not None:
            self._tls = ssl.create_default_context(cafile=settings.links.ssl_ca_file)
        self._supervisor: Supervisor | None = None
        self._link: FleetLink | None = None
        self._restarted = asyncio.Event()
        self._drained = asyncio.Event()
        self._retiring = False
        self._tasks: list[asyncio.Task[None]] = []
        self.load: tuple[float, links.LoadReport] | None = None
        """The router's last report of this replica's work, and its time on the monotonic clock; None before one."""

    @classmethod
    async def start(cls, settings: FleetSettings, name: str, find: Find, generation: int = 0) -> Host:
        """Start the engine, then dial. Raises as ``Relay.start`` does."""
        host = cls(settings, name, find, generation)
        host._engines.append(await Relay.start(settings))
        engines: list[AsyncEngine] = host._engines  # type: ignore[assignment]
        host._supervisor = Supervisor(engines, host._start_again, settings.engine.silence_s, host._changed)
        host._tasks = [asyncio.create_task(host._dial()), asyncio.create_task(host._beat())]
        return host

    async def _start_again(self, index: int) -> AsyncEngine:
        relay: AsyncEngine = await Relay.start(self.settings)  # type: ignore[assignment]
        return relay

    def _changed(self, index: int, old: object) -> None:
        self._restarted.set()

    @property
    def linked(self) -> bool:
        """True while the router has this replica."""
        return self._link is not None

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._engines[0].pid

    @property
    def failure(self) -> str | None:
        """Reason why this replica is of no use any more; None while its engine runs or may be started again."""
        supervisor = self._supervisor
        if supervisor is not None and supervisor.given_up:
            return self._engines[0].death or "it could not be started again"
        return "a task of the host has ended" if any(task.done() for task in self._tasks) else None

    async def _dial(self) -> None:
        pause, told = REDIAL_S, ""
        while True:
            relay = self._engines[0]
            if relay.death is not None:
                self._restarted.clear()
                if self._engines[0] is relay:
                    await self._restarted.wait()
                continue
            try:
                address = await self._find()
                about = {"name": self.name, "generation": self._generation, "pid": relay.pid}
                link = await links.dial(*address, self._key, **about, tls=self._tls)  # type: ignore[arg-type]
                pause, told, self._link = REDIAL_S, "", link
                try:
                    if self._retiring:
                        link.say(links.Retiring())
                    await relay.carry(link, self._heard)
                finally:
                    self._link = None
                    link.close()
            except (LinkError, EngineDeadError, ValueError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("transect: replica %s: %s", self.name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_REDIAL_S)

    def _heard(self, message: links.Message) -> None:
        if isinstance(message, links.LoadReport):
            self.load = time.monotonic(), message
        elif isinstance(message, links.Drained):
            self._drained.set()

    async def _beat(self) -> None:
        """Send signs of life, and leave a router that sends none: its machine may be lost without a word."""
        while True:
            link = self._link
            if link is not None:
                link.say(links.Heartbeat())
                if time.monotonic() - link.heard > SILENT_REPORTS + self.settings.links.lost_after_s:
                    log.warning("transect: replica %s: the router is silent, and is dialled again", self.name)
                    link.cut()
            await asyncio.sleep(links.HEARTBEAT_S)

    async def retire(self, drain_s: float | None = None) -> None:
        """Take no more requests, finish those that run, and end. After ``drain_s`` seconds (default:
        ``replicas.drain_timeout_s``) the rest continues on other replicas."""
        self._retiring = True
        limit = self.settings.replicas.drain_timeout_s if drain_s is None else drain_s
        if self._link is not None:
            self._link.say(links.Retiring())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._drained.wait()
        if self._supervisor is not None:
            await self._supervisor.close()
        for task in self._tasks:
            task.cancel()
        relay = self._engines[0]
        relay._die("it has left the fleet")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await relay.shutdown()


def fresh(load: tuple[float, links.LoadReport] | None, within_s: float) -> dict[str, float] | None:
    """Return the numbers of a report that is at most ``within_s`` seconds old; None if there is none."""
    if load is None or time.monotonic() - load[0] > within_s:
        return None
    return {name: float(value) for name, value in msgspec.structs.asdict(load[1]).items()}
