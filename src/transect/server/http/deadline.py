"""Time limits of requests. The time counts from a request's arrival and includes rendering, encoding and waiting."""

from __future__ import annotations

import asyncio
from types import TracebackType

from .errors import ApiError


class Deadline:
    """A time limit; work inside its ``async with`` block must end by then. It may be entered repeatedly, but not
    nested.

    Args:
        limit_s: seconds that a request may take; None for no limit.
        arrival: when it came, in seconds of the event loop's clock; None for now.
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
