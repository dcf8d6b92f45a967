"""``Pulse``: every rank publishes its place in the run, so that a run that hangs can report which rank waits for what.

A collective that one rank never enters keeps all others in a call that nothing interrupts. So a thread of each rank
publishes, in the store by which the ranks met, the step, what the rank is at, and for how long. When no rank has
made progress for ``timeout`` seconds, the first that notices reports in one message where each of them is, and ends the
process; the others follow. A rank that has stopped publishing counts as one without progress, also if it never began.
Work that a rank does alone, such as a checkpoint, may take any time while the rank still publishes.
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

import torch.distributed as dist

from .gathering import Store

HUNG = 3
"""Exit code of a run that stopped because of an observed failure."""
GRACE_S = 2.0
"""Seconds by which ranks other than the first wait longer, so that rank 0 reports."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's place in the run: ``seconds`` spent there; ``alone`` if the phase waits for no other rank."""

    step: int
    what: str
    seconds: float
    alone: bool
    count: int
    """Grows whenever the rank publishes."""


class Pulse:
    """One rank's heartbeat, and its watch over those of the others.

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
        """Last count of each rank, and the time at which it was new."""
        self._over = threading.Event()

    def at(self, step: int, what: str, *, alone: bool = False) -> None:
        """Record that this rank is now at ``what`` of a step."""
        self._at, self._since = (step, what, alone), time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Publish and watch while the block runs. All ranks have built their trainers before one of them enters."""
        self.at(0, "its first step", alone=True)
        self._over.clear()
        self._publish(time.monotonic())
        thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(self.interval)

    def look(self) -> str | None:
        """Publish this rank's beat. Returns an error if the run hangs, else None."""
        now = time.monotonic()
        mine = self._publish(now)
        if mine.alone or mine.seconds < self.timeout / 2:
            return None
        beats = {self.rank: mine, **self._others()}
        silent = set(range(self.size)) - set(beats)
        for rank, beat in beats.items():
            count, heard = self._heard.get(rank, (-1, now))
            heard = now if count != beat.count else heard
            self._heard[rank] = beat.count, heard
            if now - heard > 2 * self.interval + GRACE_S:
                silent.add(rank)
        if mine.seconds < self.timeout + (GRACE_S if self.rank else 0.0):
            return None
        for rank in beats.keys() - silent - {self.rank}:
            if beats[rank].alone or beats[rank].seconds < self.timeout / 2:
                return None  # it works, or has just got on
        return self._message(beats, silent)

    def _publish(self, now: float) -> Beat:
        """Write this rank's beat to the store."""
        self._count += 1
        step, what, alone = self._at
        beat = Beat(step, what, now - self._since, alone, self._count)
        self.store.set(f"pulse/{self.rank}", json.dumps(asdict(beat)))
        return beat

    def _others(self) -> dict[int, Beat]:
        """Read the last beat of each other rank that has published one."""
        keys = {rank: f"pulse/{rank}" for rank in range(self.size) if rank != self.rank}
        return {rank: Beat(**json.loads(self.store.get(key))) for rank, key in keys.items() if self.store.check([key])}

    def _message(self, beats: dict[int, Beat], silent: set[int]) -> str:
        found = []
        for rank in range(self.size):
            if rank in silent:
                found.append(f"rank {rank} sends no more signs of life")
            else:
                beat = beats[rank]
                found.append(f"rank {rank} is at {beat.what} of step {beat.step} for {beat.seconds:.0f} s")
        return (
            f"no rank has made progress for {self.timeout:g} s (parallel.timeout): {'; '.join(found)}. Continue with "
            "--resume, or raise parallel.timeout if steps may take as long"
        )

    def _run(self) -> None:
        while not self._over.wait(self.interval):
            try:
                message = self.look()
            except RuntimeError:  # the store has ended with another rank, which is reported elsewhere
                return
            if message is not None and not self._over.is_set():
                self.end(message)
                return

    def _exit(self, message: str) -> None:
        if self.rank == 0 or "rank 0 sends no signs of life" in message:
            print(f"transect: error: {message}", file=sys.stderr, flush=True)
        os._exit(HUNG)


def default_store() -> Store:
    """Return the store by which the ranks have met."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found
