"""``Pulse``: every rank says what it does and since when, so that a run that hangs can say who waits for what.

A collective that one rank never enters keeps all others in a call that nothing interrupts. So a thread of each rank
publishes, in the store by which the ranks met, the step, what the rank is at, and for how long. When no rank has got
on for ``timeout`` seconds, the first that notices tells in one message where each of them is, and ends the process; the
others follow. Work that a rank does alone, such as a checkpoint, may take as long as it likes while the
rank still publishes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as dist

HUNG = 3
"""The exit code of a run that stopped because of what it saw."""
BEGIN = 5
"""So many times the timeout a rank has for its beginning."""
GRACE_S = 2.0
"""For which a rank that is not the first leaves it to that one to tell."""


class Store(Protocol):
    """What is needed of torch's stores."""

    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank is: ``seconds`` it has been there, ``alone`` whether it waits for nobody there."""

    step: int
    what: str
    seconds: float
    alone: bool
    count: int
    """Grows whenever the rank publishes."""


class Pulse:
    """One rank's part.

    Args:
        store: shared by all ranks.
        rank, size: this one, and how many there are.
        timeout: seconds without progress of any rank.
        end: called with the message when the run hangs; by default it is printed, and the process ends.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        end: Callable[[str], object] | None = None,
    ) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.end = end or self._exit
        self.interval = min(10.0, timeout / 5)
        self._at: tuple[int, str, bool] = (0, "its start", True)
        self._since = time.monotonic()
        self._count = 0
        self._heard: dict[int, tuple[int, float]] = {}
        """The last count of each rank, and when it was new."""
        self._over = threading.Event()

    def at(self, step: int, what: str, *, alone: bool = False) -> None:
        """This rank is now at ``what`` of a step."""
        self._at, self._since = (step, what, alone), time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Publish and watch while the block runs."""
        self.at(0, "its first step", alone=True)
        self._over.clear()
        thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(self.interval)

    def look(self) -> str | None:
        """Publish, and say what is wrong if the run hangs; else None."""
        now = time.monotonic()
        self._count += 1
        step, what, alone = self._at
        mine = Beat(step, what, now - self._since, alone, self._count)
        self.store.set(f"pulse/{self.rank}", json.dumps(asdict(mine)))
        if mine.alone or mine.seconds < self.timeout + (GRACE_S if self.rank else 0.0):
            return None
        beats = {self.rank: mine}
        for rank in range(self.size):
            key = f"pulse/{rank}"
            if rank != self.rank and self.store.check([key]):
                beats[rank] = Beat(**json.loads(self.store.get(key)))
        silent = set(range(self.size)) - set(beats)
        if silent and mine.seconds < BEGIN * self.timeout:
            return None  # they have not begun: models may take long to load
        for rank, beat in beats.items():
            count, heard = self._heard.get(rank, (-1, now))
            heard = now if count != beat.count else heard
            self._heard[rank] = beat.count, heard
            if rank == self.rank:
                continue
            if now - heard > 2 * self.interval + GRACE_S:
                silent.add(rank)
            elif beat.alone or beat.seconds < self.timeout / 2:
                return None  # it works, or has just got on
        return self._message(beats, silent)

    def _message(self, beats: dict[int, Beat], silent: set[int]) -> str:
        found = []
        for rank in range(self.size):
            if rank in silent:
                found.append(f"rank {rank} is not heard of any more")
            else:
                beat = beats[rank]
                found.append(f"rank {rank} is at {beat.what} of step {beat.step} for {beat.seconds:.0f} s")
        return (
            f"no rank has got on for {self.timeout:g} s (parallel.timeout): {'; '.join(found)}. Go on with --resume, "
            "or raise parallel.timeout if steps may take as long"
        )

    def _run(self) -> None:
        while not self._over.wait(self.interval):
            try:
                message = self.look()
            except RuntimeError:  # the store has gone with another rank: that is told elsewhere
                return
            if message is not None and not self._over.is_set():
                self.end(message)
                return

    def _exit(self, message: str) -> None:
        if self.rank == 0 or "rank 0 is not heard of" in message:
            print(f"transect: error: {message}", file=sys.stderr, flush=True)
        os._exit(HUNG)


def default_store() -> Store:
    """The store by which the ranks have met."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found
