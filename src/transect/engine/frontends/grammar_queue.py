"""Requests whose grammars are being compiled. They join the engine's queue when that is done, and no step waits for
it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from ...text.grammar.params import StructuredOutputsParams
from ..scheduling import limits
from ..scheduling.core import EngineCore
from ..scheduling.request import Request
from ..scheduling.waiting_queue import QueueFull


class Compiler(Protocol):
    """``text.grammar.compiler.GrammarCompiler``."""

    def submit(self, params: StructuredOutputsParams) -> Future[Any]: ...


class GrammarQueue:
    """In front of an ``EngineCore``.

    Args:
        core: takes the requests.
        compiler: works in threads of its own.
    """

    def __init__(self, core: EngineCore, compiler: Compiler) -> None:
        self._core, self._compiler = core, compiler
        self._late: dict[str, tuple[Request, Future[Any]]] = {}

    def __len__(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._late)

    def add(self, request: Request) -> None:
        """Queue a request now, or as soon as its grammar is there. Raises what ``EngineCore.add`` raises."""
        params = request.params.structured_outputs
        if params is None:
            self._core.add(request)
            return
        scheduler = self._core.scheduler
        limits.max_length(request, scheduler.config)
        if request.request_id in self._late:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; choose another")
        waiting = scheduler.waiting
        new, most = request.output_token_ids is None, waiting.max_new
        if new and most is not None and waiting.num_new + len(self._late) >= most:
            raise QueueFull(waiting.num_new + len(self._late), waiting.retry_after())
        if request.arrival_time is None:
            request = msgspec.structs.replace(request, arrival_time=scheduler.clock.now())
        self._late[request.request_id] = request, self._compiler.submit(params)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Do what ``EngineCore.abort`` does; a request that waits here goes without another word."""
        late = self._late.get(request_id)
        if late is None:
            self._core.abort(request_id, choice)
        elif choice is None or late[0].params.n == 1:
            del self._late[request_id]
            late[1].cancel()

    def admit(self) -> list[tuple[str, Exception]]:
        """Give the engine the requests whose grammars are there. Returns those that it cannot have, by their ids."""
        refused: list[tuple[str, Exception]] = []
        for request_id, (request, future) in list(self._late.items()):
            if not future.done():
                continue
            del self._late[request_id]
            try:
                self._core.add(msgspec.structs.replace(request, constraint=future.result()))
            except Exception as error:  # of the grammar, the queue, or a compiler that has failed
                refused.append((request_id, error))
        return refused
