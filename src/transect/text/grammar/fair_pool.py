"""A thread pool for many clients: the client that has used the least time is served next.

A client whose work takes long, again and again, waits behind everybody else, and holds up others by the piece of work
that runs, not by its backlog.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

MEMORY_S = 60.0
"""Time constant, in seconds, of the decay of used time."""
MOST_CLIENTS = 1024
"""Clients whose used time is kept."""


class FairPool:
    """A pool of threads with a queue for each client.

    Args:
        threads: at the most; each is started when it is first needed.
        name: of the threads.
        clock: seconds.
    """

    def __init__(self, threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._name, self._clock = threads, name, clock
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._used: dict[str, tuple[float, float]] = {}
        """(used seconds, time of counting) of each client."""
        self._running: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, client: str, work: Callable[[], Any]) -> Future[Any]:
        """Queue work; returns a future of its result."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._waiting.setdefault(client, deque()).append((future, work))
            if not self._idle and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the threads after their current work, and cancel waiting work."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting.values():
                for future, _ in waiting:
                    future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                client = min(self._waiting, key=lambda each: (self._running.get(each, 0), self._had(each)))
                future, work = self._waiting[client].popleft()
                if not self._waiting[client]:
                    del self._waiting[client]
                if not future.set_running_or_notify_cancel():
                    continue
                self._running[client] = self._running.get(client, 0) + 1
            began = self._clock()
            try:
                future.set_result(work())
            except BaseException as error:  # the caller's business
                future.set_exception(error)
            with self._changed:
                self._charge(client, self._clock() - began)
                self._running[client] -= 1
                if not self._running[client]:
                    del self._running[client]

    def _had(self, client: str) -> float:
        """Return the seconds that a client has used recently."""
        seconds, at = self._used.get(client, (0.0, 0.0))
        return seconds * math.exp((at - self._clock()) / MEMORY_S)

    def _charge(self, client: str, seconds: float) -> None:
        self._used[client] = self._had(client) + seconds, self._clock()
        if len(self._used) > MOST_CLIENTS:
            for each in sorted(self._used, key=self._had)[: MOST_CLIENTS // 2]:
                del self._used[each]
