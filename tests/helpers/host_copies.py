"""``HostCopies``: the interface of copy engines in the memory of one process, in which threads play the ranks."""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 60.0


class HostCopies:
    """Copies immediately. A wait that lasts too long ends with an error."""

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        ctypes.memmove(to, source, nbytes)

    def post(self, address: int, value: int, stream: Any) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def wait(self, address: int, value: int, stream: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        there = ctypes.c_uint32.from_address(address)
        while there.value < value:
            if time.monotonic() > end:
                raise RuntimeError(f"{value} was not written in time: the number is {there.value}")
            time.sleep(0)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def view(self, address: int, nbytes: int) -> Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
