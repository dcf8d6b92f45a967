"""A thread pool for many clients, with fair queueing by the expected time of each task.

A task gets a finish tag when it arrives: its expected seconds plus the virtual time of the pool or the finish tag of
its client's previous task, whichever is later. The smallest tag runs next (weighted fair queueing, Demers, Keshav and
Shenker 1989). So a short task of a light client runs before the long tasks of others, however many there are, and a
client that submits long tasks repeatedly waits behind its own. A task's actual time is charged when it has ended. If a
client's last tasks took long, its next task is expected to take long too, however short it looks.

One thread takes no task that is expected to take longer than ``LIGHT_S``, so a short task finds it free or waits for
another short task.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...hardware.cores import step_aside

LIGHT_S = 0.25
"""Most expected seconds of a short piece of work."""
LEAST_S = 0.01
"""Least expected seconds of a piece."""
MOST_CLIENTS = 1024
"""Clients whose used time is kept."""


@dataclass(slots=True)
class _Client:
    end: float = 0.0
    """Virtual end of all that it has been given."""
    usual: float = 0.0
    """Seconds of its pieces, smoothed."""


@dataclass(slots=True)
class _Piece:
    future: Future[Any]
    work: Callable[[], Any]
    seconds: float
    tag: float = 0.0


class FairPool:
    """A pool of threads with a queue for each client.

    Args:
        threads: at the most; each is started when it is first needed. With two or more, one is for short pieces.
        name: of the threads.
        clock: seconds of work; called by the thread that works.
    """

    def __init__(self, threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._name, self._clock = threads, name, clock
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Piece]] = {}
        self._clients: dict[str, _Client] = {}
        self._running: dict[str, int] = {}
        self._heavy = 0
        """Long pieces that run."""
        self._virtual = 0.0
        """Seconds of work that a client has been given that always wanted some."""
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, client: str, work: Callable[[], Any], seconds: float = 0.0) -> Future[Any]:
        """Queue ``work``, which is expected to take ``seconds``, and return a future of its result.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            known = self._clients.setdefault(client, _Client())
            piece = _Piece(future, work, max(seconds, known.usual, LEAST_S))
            piece.tag = known.end = max(known.end, self._virtual) + piece.seconds
            self._waiting.setdefault(client, deque()).append(piece)
            if len(self._clients) > MOST_CLIENTS:
                self._forget()
            if not self._idle and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """End the threads after their current work, and cancel waiting work."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting.values():
                for piece in waiting:
                    piece.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        step_aside()
        while True:
            with self._changed:
                while (client := self._next()) is None:
                    if self._closed:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                piece = self._waiting[client].popleft()
                if not self._waiting[client]:
                    del self._waiting[client]
                if not piece.future.set_running_or_notify_cancel():
                    self._clients[client].end -= piece.seconds
                    continue
                self._running[client] = self._running.get(client, 0) + 1
                heavy = piece.seconds > LIGHT_S
                self._heavy += heavy
            began = self._clock()
            try:
                piece.future.set_result(piece.work())
            except BaseException as error:  # the caller's business
                piece.future.set_exception(error)
            with self._changed:
                self._heavy -= heavy
                self._charge(client, piece.seconds, self._clock() - began)
                self._running[client] -= 1
                if not self._running[client]:
                    del self._running[client]
                self._changed.notify_all()  # one that waits for a place of long pieces may have it

    def _next(self) -> str | None:
        """Return the client whose first task has the smallest tag among those that may run now; None if there is
        none."""
        room = self._heavy < max(1, self._most - 1)
        heads = ((waiting[0], client) for client, waiting in self._waiting.items())
        allowed = [(piece.tag, client) for piece, client in heads if room or piece.seconds <= LIGHT_S]
        return min(allowed)[1] if allowed else None

    def _charge(self, client: str, expected: float, seconds: float) -> None:
        """Account for a piece that took ``seconds``."""
        self._virtual += seconds / max(1, len(self._waiting.keys() | self._running.keys()))
        known = self._clients.get(client)
        if known is not None:
            known.end += seconds - expected
            known.usual = (known.usual + seconds) / 2
            for piece in self._waiting.get(client, ()):
                piece.tag += seconds - expected

    def _forget(self) -> None:
        """Forget the clients that are owed most, half of all."""
        gone = [each for each in self._clients if each not in self._waiting and each not in self._running]
        for each in sorted(gone, key=lambda each: self._clients[each].end)[: MOST_CLIENTS // 2]:
            del self._clients[each]
