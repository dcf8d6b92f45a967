"""Threads for work that would delay the event loop. Clients share them by time: one that sends much waits longer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

from ...text.grammar.fair_pool import FairPool
from .clients import current_client

T = TypeVar("T")
BYTE_S = 3e-7
"""Expected seconds for a byte of a body, or a character of a text."""


async def in_lane(pool: FairPool, size: int, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return the result of ``work`` in a thread of ``pool``, on behalf of the current client.

    Args:
        size: bytes or characters that it processes.
    """
    call = functools.partial(copy_context().run, work, *arguments, **options)
    found: T = await asyncio.wrap_future(pool.submit(current_client().name, call, BYTE_S * size))
    return found
