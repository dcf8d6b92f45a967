"""``RemoteEngine``: an engine on another machine, as an ``AsyncEngine`` whose messages pass over a link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..engine.config import EngineConfig
from ..engine.executors.pooling import Pooling
from ..engine.frontends import wire
from ..engine.frontends.async_engine import AsyncEngine
from ..engine.scheduling.outputs import EngineOutput
from ..text.model_text import ModelText
from . import links
from .links import FleetLink, LinkError


class _Far:
    """A link in the place of an engine's process, socket and context."""

    def __init__(self, link: FleetLink, said: Callable[[links.Message], None]) -> None:
        self._link, self._said = link, said
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.pid = link.peer.pid

    @property
    def returncode(self) -> int | None:
        return self._over.result() if self._over.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._over)

    def kill(self) -> None:
        self._link.cut()
        self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(0)

    def send(self, data: bytes, flags: int = 0) -> asyncio.Future[None]:
        self._link.put(links.ENGINE, data)
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent.set_result(None)
        return sent

    async def recv(self) -> bytes:
        """Return the engine's next message; never, once the link is closed."""
        try:
            while True:
                kind, data = await self._link.receive()
                if kind == links.ENGINE:
                    return data
                self._said(links.read(data))
        except LinkError:
            self._link.close()
            self._end()
            await asyncio.Event().wait()
            raise

    def destroy(self, linger: int = 0) -> None:
        self._link.close()
        self._end()


class RemoteEngine(AsyncEngine):
    """Made by ``await RemoteEngine.meet(...)`` with a link whose replica was accepted."""

    link: FleetLink

    @classmethod
    async def meet(
        cls,
        config: EngineConfig,
        text: ModelText,
        pooling: Pooling,
        link: FleetLink,
        said: Callable[[RemoteEngine, links.Message], None],
    ) -> RemoteEngine:
        """Wait for the engine's ``Ready``, and return the engine.

        Args:
            config: the router's settings of engines.
            text: tokenizer and chat template, shared by all engines.
            pooling: default of requests for embeddings.
            link: connection to the replica.
            said: called with each message of the link's own.

        Raises:
            EngineDeadError: the replica has left before that.
        """
        engine = cls(config, text)
        engine.default_pooling, engine.link = pooling, link
        engine._ended = ""
        engine._ahead = link.peer.clock - time.monotonic()

        def hear(message: links.Message) -> None:
            if isinstance(message, links.EngineEnded):
                engine._ended = message.reason
            said(engine, message)

        far: Any = _Far(link, hear)
        engine._attach(far, far, far)
        try:
            await engine._ready
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    _ended: str
    """Reason that the replica gave for its end; empty if it gave none."""
    _ahead: float
    """Seconds by which the monotonic clock of the replica's machine is ahead of this one."""

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.link.peer.name

    @property
    def generation(self) -> int:
        """Number of the roll that started the replica."""
        return self.link.peer.generation

    async def shutdown(self) -> None:
        """Leave the engine, which drops the requests of this router and waits for another one."""
        self._die("the router has left it")
        self.link.close()
        for task in (self._receiver, self._watcher):
            task.cancel()
        await asyncio.gather(self._receiver, self._watcher, return_exceptions=True)

    def _end_of(self, code: int) -> str:
        return self._ended or f"the connection to replica {self.name} was lost"

    async def _send(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Submit) and message.arrival is not None:
            message.arrival += self._ahead
        await super()._send(message)

    def _take(self, output: EngineOutput) -> None:
        times = output.times
        if times is not None:
            fields = {name: getattr(times, name) for name in times.__struct_fields__}
            here = {name: None if value is None else value - self._ahead for name, value in fields.items()}
            output.times = msgspec.structs.replace(times, **here)
        super()._take(output)
