"""Cancelling work whose client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from .turns import ArrivalGate

T = TypeVar("T")


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
