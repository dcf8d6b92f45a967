"""Requests whose adapters are being read, in the engine's process: they join the queue when that is done.

A thread reads one adapter after another, so no step waits for a disk. An adapter that is asked for comes when there is
room in host memory: if all that are there have requests, it waits for one of those to end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ...checkpoints.peft_config import AdapterFiles
from ...hardware.cores import step_aside
from ..scheduling.request import Request

if TYPE_CHECKING:
    from ..adapters import AdapterStore


class AdapterQueue:
    """Stands before ``GrammarQueue``.

    Args:
        store: adapters in host memory; None if the engine serves none.
        add: takes a request whose adapter is in memory, or raises.
    """

    def __init__(self, store: AdapterStore | None, add: Callable[[Request], object]) -> None:
        self._store, self._add = store, add
        self._waiting: dict[str, Request] = {}
        self._files: dict[str, AdapterFiles] = {}
        """Adapters that are wanted and not in memory, by content id, in the order of asking."""
        self._loading: tuple[str, Future[None]] | None = None
        self._pool = ThreadPoolExecutor(1, "adapters", initializer=step_aside)
        self.loaded: list[tuple[str, str]] = []
        """Adapters that have been read, or have failed: content id, and the error or an empty text."""

    def __len__(self) -> int:
        """Count the awaited adapters, and the news of adapters that has not been taken."""
        return len(self._files) + len(self.loaded)

    @property
    def waiting(self) -> list[str]:
        """Ids of the waiting requests."""
        return list(self._waiting)

    def add(self, request: Request, files: AdapterFiles) -> None:
        """Queue a request now, or as soon as its adapter is in memory. Raises what ``add`` of ``__init__`` raises."""
        if self._store is None:
            raise ValueError("this engine serves no adapters: start it with --enable-lora")
        if files.id in self._store:
            self._store.get(files.id)
            self._add(request)
            return
        if request.request_id in self._waiting:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; choose another")
        self._waiting[request.request_id] = request
        self._files.setdefault(files.id, files)

    def load(self, files: AdapterFiles) -> None:
        """Read an adapter that no request has asked for yet; ``loaded`` will tell."""
        if self._store is None:
            self.loaded.append((files.id, "this engine serves no adapters: start it with --enable-lora"))
        elif files.id in self._store:
            self._store.get(files.id)
            self.loaded.append((files.id, ""))
        else:
            self._files.setdefault(files.id, files)

    def forget(self, adapter: str) -> None:
        """Let go of an adapter that no request has."""
        if self._store is not None:
            self._store.forget(adapter)

    def abort(self, request_id: str, choice: int | None) -> bool:
        """Take out a request that waits here. Returns False if there is none."""
        request = self._waiting.get(request_id)
        if request is not None and (choice is None or request.params.n == 1):
            del self._waiting[request_id]
        return request is not None

    def admit(self) -> list[tuple[str, Exception]]:
        """Give on the requests whose adapters are in memory, and begin to read the next. Returns those that cannot be
        served, by their ids."""
        if self._store is None:
            return []
        refused: list[tuple[str, Exception]] = []
        if self._loading is not None and self._loading[1].done():
            (adapter, future), self._loading = self._loading, None
            refused = self._taken(adapter, future.exception())
        self._store.shrink()
        if self._loading is None and self._files and self._store.has_room:
            files = next(iter(self._files.values()))
            self._loading = files.id, self._pool.submit(self._store.load, files)
        return refused

    def _taken(self, adapter: str, problem: BaseException | None) -> list[tuple[str, Exception]]:
        """Give on the requests of an adapter that has been read, or refuse them."""
        del self._files[adapter]
        self.loaded.append((adapter, "" if problem is None else str(problem)))
        refused: list[tuple[str, Exception]] = []
        for request in [each for each in self._waiting.values() if each.adapter == adapter]:
            del self._waiting[request.request_id]
            try:
                if problem is not None:
                    raise problem
                self._add(request)
            except Exception as error:
                refused.append((request.request_id, error))
        return refused

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
