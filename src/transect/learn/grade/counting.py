"""Counts the work of one run, so that a slow solution differs from a fast one without a clock.

``lines``: lines of the student's Python that ran. ``bytes``: bytes that torch's operators read and wrote, views left
out. ``traffic``: bytes of the 32-byte sectors of memory that a kernel's loads and stores touched, counted in Triton's
interpreter; it grows where threads read again, and where neighbours read places that are apart (not coalesced).
``lines of cache``: bytes that a C++ program fetches through a small cache, counted by ``traffic.cpp``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .watch import Watch

SECTOR = 32


class Count:
    """A number that grows."""

    def __init__(self) -> None:
        self.value = 0


@contextmanager
def counting(kind: str, watch: Watch) -> Iterator[Count]:
    """Count inside the block."""
    count = Count()
    if kind == "lines":
        with _lines(watch.file, count):
            yield count
    elif kind == "bytes":
        watch._operators.bytes = 0
        try:
            yield count
        finally:
            count.value, watch._operators.bytes = watch._operators.bytes or 0, None
    elif kind == "traffic":
        with _traffic(count):
            yield count
    else:
        yield count


@contextmanager
def _lines(file: str, count: Count) -> Iterator[None]:
    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            count.value += 1
        return local

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _traffic(count: Count) -> Iterator[None]:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    originals = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}

    def counted(name: str, mask_at: int) -> Any:
        def function(*arguments: Any, **named: Any) -> Any:
            pointers = arguments[0].data.reshape(-1)
            mask = arguments[mask_at] if mask_at < len(arguments) else named.get("mask")
            if mask is not None:
                pointers = pointers[np.broadcast_to(mask.data, arguments[0].data.shape).reshape(-1).astype(bool)]
            count.value += SECTOR * len(np.unique(pointers // np.uint64(SECTOR)))
            return originals[name](*arguments, **named)

        return function

    builder.create_masked_load = counted("create_masked_load", 1)
    builder.create_masked_store = counted("create_masked_store", 2)
    try:
        yield
    finally:
        for name in originals:
            delattr(builder, name)
