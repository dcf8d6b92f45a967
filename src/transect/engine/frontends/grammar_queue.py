"""Requests whose grammars are being compiled. They join the engine's queue afterwards, so no step waits for a
compilation."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...text.grammar.params import StructuredOutputsParams
from ..scheduling.arrivals import max_length
from ..scheduling.core import EngineCore
from ..scheduling.policies.admission import Claim
from ..scheduling.request import Request


class Compiler(Protocol):
    """``text.grammar.compiler.GrammarCompiler``."""

    def submit(self, params: StructuredOutputsParams, client: str) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class _Late:
    """A request whose grammar is being compiled."""

    request: Request
    claim: Claim
    future: Future[Any]


class GrammarQueue:
    """Queue in front of an ``EngineCore``.

    Args:
        core: takes the requests.
        compiler: works in threads of its own.
    """

    def __init__(self, core: EngineCore, compiler: Compiler) -> None:
        self._core, self._compiler = core, compiler
        self._late: dict[str, _Late] = {}

    def __len__(self) -> int:
        """Count the requests that wait for their grammars."""
        return len(self._late)

    @property
    def adapters(self) -> set[str]:
        """Content ids of the adapters of these requests."""
        return {late.request.adapter for late in self._late.values()}

    @property
    def waiting(self) -> list[str]:
        """Ids of the waiting requests."""
        return list(self._late)

    def add(self, request: Request) -> None:
        """Queue a request now, or as soon as its grammar is compiled. Raises the errors of ``EngineCore.add``."""
        params = request.params.structured_outputs
        if request.request_id in self._late:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; choose another")
        if params is None:
            self._core.add(request)
            return
        scheduler = self._core.scheduler
        claim, key = scheduler.arrivals.claim(request, max_length(request, scheduler.config))
        if not request.carried_over:
            scheduler.waiting.check_room(claim, key)
        if request.arrival_time is None:
            request = msgspec.structs.replace(request, arrival_time=scheduler.clock.now())
        self._late[request.request_id] = _Late(request, claim, self._compiler.submit(params, request.client))
        scheduler.waiting.elsewhere.add(claim)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Abort like ``EngineCore.abort``; a request that waits here is dropped without output."""
        late = self._late.get(request_id)
        if late is None:
            self._core.abort(request_id, choice)
        elif choice is None or late.request.params.n == 1:
            self._take_out(request_id)
            late.future.cancel()

    def admit(self) -> list[tuple[str, Exception]]:
        """Pass requests with compiled grammars to the engine. Returns refused requests, by id, with the errors."""
        refused: list[tuple[str, Exception]] = []
        for request_id, late in list(self._late.items()):
            if not late.future.done():
                continue
            self._take_out(request_id)
            let_in = self._core.scheduler.waiting.let_in
            let_in.add(request_id)
            try:
                self._core.add(msgspec.structs.replace(late.request, constraint=late.future.result()))
            except Exception as error:  # of the grammar, or a compiler that has failed
                refused.append((request_id, error))
            finally:
                let_in.discard(request_id)
        return refused

    def _take_out(self, request_id: str) -> None:
        late = self._late.pop(request_id)
        self._core.scheduler.waiting.elsewhere.add(late.claim, -1)
