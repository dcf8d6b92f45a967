"""Copies between memories of GPUs, and numbers that streams write and wait for, by copy engines alone.

A copy that a kernel makes takes multiprocessors from the products that run beside it. Copy engines, and the part of a
GPU that reads its streams, take none (CUDA driver API: ``cuMemcpyAsync``, ``cuStreamWriteValue32``,
``cuStreamWaitValue32``). Addresses may be of another process of the host (``peer_memory.py``).
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from .peer_memory import memory_at

AT_LEAST = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``."""


class Copies(Protocol):
    """Operations that can be put on a stream; ``None`` is the stream of a host."""

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None: ...

    def post(self, address: int, value: int, stream: Any) -> None: ...

    def wait(self, address: int, value: int, stream: Any) -> None: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]: ...

    def view(self, address: int, nbytes: int) -> Tensor: ...


@cache
def _driver(name: str, *kinds: Any) -> Any:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = kinds, ctypes.c_int
    return function


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"a stream could not {what}: CUDA error {code}")


class EngineCopies:
    """On a GPU; streams are torch's.

    Raises (when called):
        RuntimeError: the driver refused.
    """

    def __init__(self) -> None:
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        self._copy = _driver("cuMemcpyAsync", u64, u64, ctypes.c_size_t, ctypes.c_void_p)
        self._write = _driver("cuStreamWriteValue32_v2", ctypes.c_void_p, u64, u32, u32)
        self._wait = _driver("cuStreamWaitValue32_v2", ctypes.c_void_p, u64, u32, u32)

    def copy(self, to: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Copy ``nbytes`` bytes, in the order of the stream."""
        _check("copy", self._copy(to, source, nbytes, stream.cuda_stream))

    def post(self, address: int, value: int, stream: torch.cuda.Stream) -> None:
        """Write a number of 4 bytes when all before it on the stream is done, and can be seen."""
        _check("write a number", self._write(stream.cuda_stream, address, value, 0))

    def wait(self, address: int, value: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait until the number at ``address`` is at least ``value``."""
        _check("wait for a number", self._wait(stream.cuda_stream, address, value, AT_LEAST))

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Launch kernels inside the block on this stream."""
        return torch.cuda.stream(stream)

    def view(self, address: int, nbytes: int) -> Tensor:
        """View memory of the current GPU as bytes; it must outlive the tensor."""
        return memory_at(address, nbytes)
