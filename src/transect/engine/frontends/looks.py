"""Look at other processes at regular intervals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

WATCH_S = 0.1
"""Seconds between two looks of a supervisor or router at its replicas."""


async def looks() -> AsyncIterator[float]:
    """Yield every ``WATCH_S`` seconds the seconds since the last look, at most ``2 * WATCH_S``: a pause of this process
    is not silence of the others, whose messages wait in the socket."""
    clock = asyncio.get_running_loop().time
    before = clock()
    while True:
        await asyncio.sleep(WATCH_S)
        now = clock()
        yield min(now - before, 2 * WATCH_S)
        before = now
