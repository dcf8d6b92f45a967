"""Watch engines for readers of ``/live``: one task for each engine that has readers, none otherwise.

A watch reads the decision log, which is kept anyway, and asks the engine for its block tables a few times a second. All
readers get the same deltas; a slow reader that misses some gets the whole state again.

Deltas are made when records arrive, which wakes this process anyway. A timer would wake it between two steps, and so
take a core from the threads of an engine on the same CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..http.errors import ApiError

if TYPE_CHECKING:
    from ...engine.scheduling.decisions import DecisionRing
    from ...engine.scheduling.policies.routing import Ticket
    from ...engine.scheduling.snapshot import SchedulerSnapshot
    from ...explain.engine.kv_map import KVMap
    from ...explain.engine.live_log import LiveLog, LogNews
    from ...explain.engine.log import LoggedStep
    from ...explain.engine.work import StepWork

log = logging.getLogger("transect.server")

TICK_S = 0.1
"""Least seconds between deltas."""
QUIET_S = 1.0
"""Seconds between deltas and between snapshots while nothing happens."""
LOOK_S = 0.3
"""Seconds between snapshots of a busy engine."""
BLOCKS_PER_S = 200_000
"""Most KV blocks that snapshots describe in a second, so that a large pool is drawn less often."""
HISTORY_BYTES = 64 * 1024
HISTORY = 400
"""Bytes of the log, and steps, that a watch begins with and readers get at once."""
KEPT = 64
"""Deltas that a slow reader may be behind."""
PATIENCE_S = 5.0
"""Seconds to wait for the first snapshot of an engine: it answers between two steps."""
MOST_READERS = 32


@dataclass(slots=True)
class LiveDelta:
    """Changes since the delta before."""

    number: int
    now: float
    """Time on the engine's clock, in seconds."""
    news: LogNews
    seen: SchedulerSnapshot | None = None
    """The newest snapshot, if it is new."""
    kv: KVMap | None = None
    """Its map."""
    routed: list[tuple[str, str, Ticket]] = field(default_factory=list)
    """The router's choices."""


class EngineWatch:
    """State and recent work of one engine, kept as long as there are readers.

    Args:
        engines: of the server; replicas are replaced in this list.
        index: of the engine.
    """

    def __init__(self, engine: Any, index: int) -> None:
        self._whole, self._index = engine, index
        self.deltas: deque[LiveDelta] = deque(maxlen=KEPT)
        self.changed = asyncio.Event()
        """Set, and replaced, with each delta."""
        self.readers = 0
        self.began = 0
        """Number of the first delta since the engine was started or replaced."""
        self.log: LiveLog | None = None
        self.work: StepWork | None = None
        self.steps: deque[LoggedStep] = deque(maxlen=HISTORY)
        self.seen: SchedulerSnapshot | None = None
        self.kv: KVMap | None = None
        self.death: str | None = None
        """Reason for the engine's end; None while it lives."""
        self._engine: Any = None
        self._position = self._routed = 0
        self._number = 0
        self._looking: asyncio.Task[SchedulerSnapshot] | None = None
        self._next_look = self._next_tick = self._due = 0.0
        self._ring: DecisionRing | None = None
        """Decision log that wakes the watch."""
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def ring(self) -> Any:
        """The decision log in memory of the engine that is watched now."""
        return self._engine.decisions

    def enter(self) -> None:
        """Count a reader; the first starts the watch."""
        self.readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Forget a reader; the last ends the watch."""
        self.readers -= 1
        if not self.readers and self._task is not None:
            for task in (self._task, self._looking):
                if task is not None:
                    task.cancel()
            self._listen(None)
            self._task = self._looking = self._engine = None
            self.log = self.work = self.seen = self.kv = None
            self.deltas.clear()
            self.steps.clear()

    def routed(self) -> list[tuple[str, str, Ticket]]:
        """Return the router's remembered choices; none if there is one engine."""
        return list(getattr(self._whole, "routed", ()))

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._tick(began)
            except Exception as error:
                if not isinstance(error, (RuntimeError, TimeoutError)):  # of an engine that has ended, or hangs
                    log.exception("an engine could not be watched")
                self._engine, self.log, self.death = None, None, str(error) or "it does not answer"
                self._wake()
                await asyncio.sleep(QUIET_S)  # another may take its place
            await self._rest(began)

    async def _rest(self, began: float) -> None:
        """Wait for news after a tick that began at ``began``: at least ``TICK_S``, at most ``QUIET_S``."""
        self._due = max(began + TICK_S, time.monotonic() + 0.01)
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), QUIET_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _heard(self) -> None:
        """End the rest, or have it end soon if it has just begun and nothing more comes."""
        if (late := time.monotonic() - self._due) >= 0:
            self._news.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S - late, self._news.set)

    def _listen(self, ring: DecisionRing | None) -> None:
        """Let the records of this log end rests, and no others."""
        if self._ring is not None:
            self._ring.listeners.remove(self._heard)
        if ring is not None:
            ring.listeners.append(self._heard)
        self._ring = ring

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _tick(self, now: float) -> None:
        engine = getattr(self._whole, "engines", [self._whole])[self._index]
        if engine is not self._engine or self.log is None:
            await self._begin(engine)
            return
        news = self.log.take(self.ring.since(self._position))
        self._position = self.ring.count
        self.steps.extend(news.steps)
        seen = self._look(now, bool(news))
        routed: list[tuple[str, str, Ticket]] = []
        if (count := getattr(self._whole, "num_routed", 0)) > self._routed:
            routed = self.routed()[-(count - self._routed) :]
            self._routed = count
        if news or seen or routed or now >= self._next_tick:
            self._next_tick = now + QUIET_S
            self._publish(LiveDelta(self._number + 1, now, news, seen, self.kv if seen else None, routed))

    def _publish(self, delta: LiveDelta) -> None:
        self._number = delta.number
        self.deltas.append(delta)
        self._wake()

    async def _begin(self, engine: Any) -> None:
        from ...engine.scheduling.decisions import read_records
        from ...explain.engine.live_log import LiveLog, LogNews
        from ...explain.engine.rates import rates_for
        from ...explain.engine.work import StepWork

        self._engine, self._looking = engine, None
        self._listen(engine.decisions)
        async with asyncio.timeout(PATIENCE_S):
            seen = await engine.look(requests=True)
        header = next(iter(read_records(engine.decisions.header)))
        assert header is not None
        self.work = StepWork.of(header, rates_for(header, measure=False))  # type: ignore[arg-type]
        self.log = LiveLog(header)  # type: ignore[arg-type]
        past = self.log.take(engine.decisions.since(0, HISTORY_BYTES))
        self._position, self._routed = engine.decisions.count, getattr(self._whole, "num_routed", 0)
        self.log.adopt(seen.requests)
        self.steps.clear()
        self.steps.extend(past.steps)
        self.death, self.kv = None, None
        self._take(seen)
        self.began = self._number + 1
        self._publish(LiveDelta(self.began, time.monotonic(), LogNews()))

    def _take(self, seen: SchedulerSnapshot) -> None:
        from ...explain.engine.kv_map import KVMap

        self.seen, self.kv = seen, KVMap.of(seen, self.kv)
        described = self.kv.owners.size - (seen.stats.kv_blocks_total - seen.stats.kv_blocks_used)
        described += seen.stats.kv_blocks_cached
        self._next_look = time.monotonic() + max(LOOK_S, described / BLOCKS_PER_S)

    def _look(self, now: float, busy: bool) -> SchedulerSnapshot | None:
        """Ask the engine for a snapshot if it is time; returns one that has come."""
        if self._looking is not None and self._looking.done():
            seen, self._looking = self._looking.result(), None
            self._take(seen)
            if not busy:
                self._next_look = max(self._next_look, now + QUIET_S)
            return seen
        if self._looking is None and now >= self._next_look:
            self._looking = asyncio.create_task(self._engine.look())
            self._looking.add_done_callback(lambda _: self._heard())
        return None


class Watches:
    """The watches of a server's engines."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._watches: dict[int, EngineWatch] = {}

    @property
    def count(self) -> int:
        """Number of engines."""
        return len(getattr(self._engine, "engines", (0,)))

    @property
    def readers(self) -> int:
        """Number of readers of all engines."""
        return sum(each.readers for each in self._watches.values())

    def of(self, index: int) -> EngineWatch:
        """Return the watch of an engine.

        Raises:
            ApiError: there is no such engine, it keeps no log, or there are too many readers.
        """
        if not 0 <= index < self.count:
            raise ApiError(404, f"engine must be 0 to {self.count - 1}, got {index}", param="engine")
        engine = getattr(self._engine, "engines", [self._engine])[index]
        if getattr(engine, "look", None) is None or not engine.config.decisions:
            raise ApiError(404, "this engine keeps no log of decisions", code="no_decisions")
        if self.readers >= MOST_READERS:
            message = f"{MOST_READERS} pages watch this server already: close one of them"
            raise ApiError(429, message, code="too_many_readers", headers={"Retry-After": "5"})
        return self._watches.setdefault(index, EngineWatch(self._engine, index))


async def deltas_of(watch: EngineWatch) -> AsyncGenerator[LiveDelta | None, None]:
    """Yield the deltas of a watch for one reader, from now on.

    None comes at the beginning, and again when the engine was replaced or the reader is too far behind: the reader has
    to begin with the state that the watch has. It comes too when the engine has ended (``EngineWatch.death``).
    """
    watch.enter()
    try:
        last = -1
        while True:
            newest = watch.deltas[-1].number if watch.deltas else 0
            oldest = watch.deltas[0].number if watch.deltas else 0
            if watch.log is None:
                if watch.death is not None:
                    yield None
                    last = -1
                await watch.changed.wait()
            elif last < max(watch.began, oldest - 1):
                last = newest
                yield None
            elif last == newest:
                await watch.changed.wait()
            else:
                for delta in [each for each in watch.deltas if each.number > last]:
                    last = delta.number
                    yield delta
    finally:
        watch.leave()
