"""A gate that lets crowds of requests pass a few at a time, so that other work runs in between.

A thousand requests that arrive together, or whose clients leave together, are a thousand tasks that become ready in one
pass of the event loop. Whatever else wants to run (streams, /health) would wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 2
"""Requests that pass in one turn of the event loop. Each takes about a millisecond."""


class ArrivalGate:
    """A gate in the order of arrival; it delays nothing while few requests pass.

    Args:
        at_once: number that pass between two chances for others.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def wait(self) -> None:
        """Pass, at once or in a later turn of the event loop."""
        if self._passed < self._at_once and not self._waiting:
            self._passed += 1
            self._schedule()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._scheduled, self._passed = False, 0
        while self._waiting and self._passed < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # its request was cancelled
                turn.set_result(None)
                self._passed += 1
        if self._waiting or self._passed:
            self._schedule()
