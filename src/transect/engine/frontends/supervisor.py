"""``Supervisor``: watches replicas, ends those that hang, restarts those that have ended, and replaces old ones by new
ones while the old ones finish their streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from .async_engine import AsyncEngine
from .looks import looks
from .streams import EngineDeadError

log = logging.getLogger(__name__)

MOST_STARTS = 5
"""Consecutive attempts to start a replica before it is given up."""
QUICK_S = 1.0
"""Seconds of silence below which the process is not examined."""
PATIENCE = 5.0
"""Factor on the allowed silence of a process that computes, or waits for a core or a disk."""
START_S, START_RATIO = 30.0, 4.0
"""Time limit of a start: seconds, plus a multiple of the load time of the engine before."""
FIRST_PAUSE_S = 1.0
"""Seconds before the second attempt; each later pause is twice as long."""


def is_busy(pid: int) -> bool:
    """Return True if a thread of the process runs, waits for a core, or waits for a disk. False on systems without
    ``/proc``, and if the process is stopped (SIGSTOP) or all of its threads sleep."""
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = each.read_text().rpartition(")")[2].split()[0]
        except OSError:  # the thread has just ended
            continue
        if state in ("R", "D"):
            return True
    return False


class Supervisor:
    """Keeps every place of a list of engines filled with a living one.

    Args:
        engines: the list; ended ones are replaced in it.
        start: starts the engine of one place.
        silence_s: seconds without a sign of life after which an engine has hung; None if engines that hang or end
            are left alone.
        changed: called when an engine was replaced or given up.
    """

    def __init__(
        self,
        engines: list[AsyncEngine],
        start: Callable[[int], Awaitable[AsyncEngine]],
        silence_s: float | None,
        changed: Callable[[int, AsyncEngine | None], None],
    ) -> None:
        self.given_up: set[int] = set()
        """Places whose engine could not be restarted."""
        self._engines, self._start, self._changed = engines, start, changed
        self._quiet: dict[AsyncEngine, tuple[float, float]] = {}
        """Time of the last sign of life, and seconds watched since then."""
        self._unused_lives = [0] * len(engines)
        """Number of consecutive engines, by place, that ended before they had served a request."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._retiring: dict[AsyncEngine, asyncio.Task[None]] = {}
        """Replaced engines, each with the task that waits for the end of its streams."""
        self._watching = None if silence_s is None else asyncio.create_task(self._watch(silence_s))

    @property
    def restarts(self) -> bool:
        """True if engines that end are started again."""
        return self._watching is not None

    @property
    def hopes(self) -> bool:
        """True while an engine lives or may be restarted."""
        if self.restarts:
            return len(self.given_up) < len(self._engines)
        return any(engine.death is None for engine in self._engines)

    @property
    def starting(self) -> set[int]:
        """Places whose engine is being restarted."""
        return {index for index, task in self._tasks.items() if not task.done()}

    async def _watch(self, silence_s: float) -> None:
        async for passed in looks():
            for index, engine in enumerate(self._engines):
                if engine.death is None:
                    self._check_silence(engine, passed, silence_s)
                elif index not in self.starting and index not in self.given_up:
                    self._tasks[index] = asyncio.create_task(self._restart(index, engine))
            self._quiet = {engine: seen for engine, seen in self._quiet.items() if engine in self._engines}

    def _check_silence(self, engine: AsyncEngine, passed: float, limit: float) -> None:
        heard, quiet = self._quiet.get(engine, (engine.heard, 0.0))
        if heard != engine.heard:
            quiet = passed = 0.0
        elif quiet > QUICK_S and is_busy(engine.pid):
            passed /= PATIENCE
        quiet += passed
        self._quiet[engine] = engine.heard, quiet
        if quiet > limit:
            engine.kill(f"it gave no sign of life for {quiet:.1f} s and was killed")

    async def _restart(self, index: int, old: AsyncEngine) -> None:
        log.error("transect: error: replica %d has ended (%s): it is started again", index, old.death)
        self._unused_lives[index] = 0 if old.served else self._unused_lives[index] + 1
        await old.shutdown()
        pause = FIRST_PAUSE_S * 2 ** (self._unused_lives[index] - 2) if self._unused_lives[index] > 1 else 0.0
        for attempt in range(MOST_STARTS - self._unused_lives[index]):
            await asyncio.sleep(pause)
            try:
                engine = await self._start_like(index, old)
            except (ValueError, EngineDeadError, OSError) as error:
                pause = FIRST_PAUSE_S * 2**attempt
                log.error("transect: error: replica %d could not be started again: %s", index, error)
            else:
                self._engines[index] = engine
                log.warning("transect: replica %d is back", index)
                self._changed(index, old)
                return
        self.given_up.add(index)
        log.error("transect: error: replica %d is given up: restart the server to have it back", index)
        self._changed(index, None)

    async def _start_like(self, index: int, old: AsyncEngine) -> AsyncEngine:
        """Start the engine of a place, and kill it as hung if that takes much longer than ``old`` took.

        Raises:
            ValueError, EngineDeadError: it did not start.
        """
        limit = START_S + START_RATIO * old.info.load_seconds
        try:
            async with asyncio.timeout(limit):
                return await self._start(index)
        except TimeoutError:
            raise EngineDeadError(f"it was not ready after {limit:.0f} s and was killed") from None

    async def replace(self, drain_s: float) -> None:
        """Start a new engine in every place, one after another, and retire the old one as soon as the new one takes
        requests. The old one finishes its streams; after ``drain_s`` seconds it is killed.

        Raises:
            ValueError, EngineDeadError: a new engine could not be started; the old ones of this place and the places
                after it stay.
        """
        for index in range(len(self._engines)):
            old = self._engines[index]
            engine = await self._start_like(index, old)
            self._engines[index] = engine
            self.given_up.discard(index)
            self._changed(index, old)
            old.retired = True
            self._retiring[old] = asyncio.create_task(self._retire(old, drain_s))

    async def _retire(self, old: AsyncEngine, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await old.drain()
        except TimeoutError:
            old.kill(
                f"the server's settings or weights were changed, and this answer took longer than {drain_s:g} s after "
                "that (--drain-timeout): send the request again"
            )
        await old.shutdown()
        del self._retiring[old]

    async def close(self) -> None:
        """Stop watching; engines that are being started or retired are ended."""
        retiring = list(self._retiring)
        tasks = [*filter(None, [self._watching]), *self._tasks.values(), *self._retiring.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.shutdown() for engine in retiring))
