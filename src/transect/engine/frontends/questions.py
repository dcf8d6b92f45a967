"""Questions to an engine process, and the callers that wait for the answers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Questions:
    """Futures of callers, by subject. Answers about a subject come in the order of its questions."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[Any]]] = {}

    def ask(self, subject: str = "") -> asyncio.Future[Any]:
        """Return the future of a new question; send the question before another caller asks one."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(subject, deque()).append(waiter)
        return waiter

    def answer(self, value: object, subject: str = "") -> None:
        """Answer the oldest question about a subject, whose caller may have left."""
        waiter = self._waiting[subject].popleft()
        if not waiter.done():
            waiter.set_result(value)

    def answer_all(self, value: object, subject: str) -> None:
        """Answer all questions about a subject, of which there may be none."""
        while self._waiting.get(subject):
            self.answer(value, subject)
        self._waiting.pop(subject, None)

    def fail(self, error: Exception) -> None:
        """Fail all questions."""
        for waiter in [each for waiters in self._waiting.values() for each in waiters]:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()
