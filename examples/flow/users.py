"""Simulated users of a server: they ask, judge the form of the answer, and correct what is wrong."""

import csv
import json
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from checks import is_form

AT_ONCE = 4
"""Users that ask at the same time."""


def questions(*files: Path) -> list[dict[str, str]]:
    """Read questions with the right answers."""
    return [row for file in files for row in csv.DictReader(file.open())]


class Users:
    """Users who ask one question each.

    Args:
        server: its address. model: the name that they ask for.
        asked: questions, drawn at random.
    """

    def __init__(self, server: str, model: str, asked: Sequence[dict[str, str]], seed: int = 0) -> None:
        self.server, self.model, self.asked = server, model, list(asked)
        self.liked = self.disliked = self.failed = 0
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._number, self._group = 0, uuid.uuid4().hex[:8]

    def ask(self, count: int) -> None:
        """Let ``count`` users ask."""
        left = iter(range(count))

        def more() -> bool:
            with self._lock:
                return next(left, None) is not None

        self._run(more)

    def ask_until(self, done: Callable[[], bool]) -> None:
        """Let users ask until ``done`` returns True."""
        self._run(lambda: not done())

    def _run(self, more: Callable[[], bool]) -> None:
        threads = [threading.Thread(target=self._some, args=(more,)) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _some(self, more: Callable[[], bool]) -> None:
        with httpx.Client(base_url=self.server, timeout=120) as client:
            while more():
                with self._lock:
                    self._number += 1
                    user, row = f"user-{self._group}-{self._number}", self._draw.choice(self.asked)
                self._one(client, user, row)

    def _one(self, client: httpx.Client, user: str, row: dict[str, str]) -> None:
        body: dict[str, Any] = {"model": self.model, "user": user, "temperature": 0, "max_tokens": 32}
        body["messages"] = [{"role": "user", "content": row["question"]}]
        answer = client.post("/v1/chat/completions", json=body)
        if answer.is_error:
            self.failed += 1
            return
        found = answer.json()
        good = is_form(found["choices"][0]["message"]["content"], row)
        said = {"thumb": "up"} if good else {"thumb": "down", "correction": json.dumps(json.loads(row["answer"]))}
        client.post("/v1/feedback", json={"id": found["id"], **said}).raise_for_status()
        with self._lock:
            self.liked += bool(good)
            self.disliked += not good
