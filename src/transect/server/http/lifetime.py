"""Ends of requests that come early: at their time limit, or when their client disconnects.

The time counts from a request's arrival and includes rendering, encoding and waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive

from .errors import ApiError
from .turns import ArrivalGate

T = TypeVar("T")


class Deadline:
    """A time limit; work inside its ``async with`` block must end by then. It may be entered repeatedly, but not
    nested.

    Args:
        limit_s: seconds that a request may take; None for no limit.
        arrival: time of its arrival, in seconds of the event loop's clock; None if it arrives now.
    """

    def __init__(self, limit_s: float | None, arrival: float | None = None) -> None:
        self.limit_s = limit_s
        if limit_s is not None:
            arrival = asyncio.get_running_loop().time() if arrival is None else arrival
            self._at = arrival + limit_s
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        if self.limit_s is not None:
            self._timeout = await asyncio.timeout_at(self._at).__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise ApiError 504 if the time was over."""
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            return
        try:
            await timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            message = f"the request took longer than this server's limit of {self.limit_s:g} s: ask for fewer tokens"
            raise ApiError(504, message, code="request_timeout") from None


GONE = Response(status_code=499)
"""Response for a closed connection; no client reads it."""


class ClientGone(Exception):
    """The client closed the connection before its answer was complete; there is no one to report to."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T], turns: ArrivalGate | None = None) -> T:
    """Run ``work``, and cancel it if the client disconnects.

    Args:
        turns: gate for clients that leave in crowds; None for no gate.
        receive: the ASGI channel; the request's body must have been read already.
        work: cancelled, and awaited to its end, where the client goes away first.

    Raises:
        ClientGone: the client went away.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    gone = False

    async def watch() -> None:
        nonlocal gone
        await _disconnected(receive)
        if turns is not None:
            await turns.wait()
        gone = True
        task.cancel()

    # The work runs in this task: a separate one would begin after all requests that have arrived meanwhile.
    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() <= cancelled:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()  # and it is not waited for: the first event of an answer would wait with it


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
