"""Ctrl-C takes effect between two engine steps or while the device works, never within the engine's bookkeeping."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldInterrupts:
    """While entered, holds SIGINT until ``check`` or the end of the block delivers it. A second SIGINT does not wait
    for the device.

    Does nothing outside the main thread, which alone receives signals, or where SIGINT is not handled by Python code.

    Args:
        may_break: True while an exception does no harm that the engine cannot mend; a second SIGINT is delivered then.
    """

    def __init__(self, may_break: Callable[[], bool]) -> None:
        self._may_break = may_break
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._noted = False

    def __enter__(self) -> HeldInterrupts:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted and self._may_break():
            self._deliver(frame)
        self._noted = True

    def _deliver(self, frame: FrameType | None = None) -> None:
        self._noted = False
        if self._handler is not None:
            self._handler(signal.SIGINT, frame)

    def check(self) -> None:
        """Deliver a SIGINT that has arrived, which usually raises KeyboardInterrupt."""
        if self._noted:
            self._deliver()

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.check()
