"""Memory of a GPU that other processes of the host can write to, by CUDA's handles (``cudaIpcGetMemHandle``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..lang.cuda import bind

HANDLE = 64
"""Bytes of a handle."""


class PeerMemory:
    """Memory on the current GPU, in the initial state that ``all_reduce.cu`` expects.

    Raises:
        Unavailable: no GPU, or nothing to build ``all_reduce.cu`` with.
        RuntimeError: CUDA refused; some virtual machines and containers do not share memory between processes.
    """

    def __init__(self, nbytes: int) -> None:
        pointer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(HANDLE)
        make = bind("all_reduce", "transect_peer_make", "lpp")
        _check("shared", make(nbytes, ctypes.addressof(pointer), ctypes.addressof(handle)))
        assert pointer.value is not None
        self.address, self.handle, self.nbytes = pointer.value, handle.raw, nbytes

    @staticmethod
    def opened(handle: bytes) -> int:
        """Return the address, here, of the memory of another process.

        Raises:
            RuntimeError: CUDA refused.
        """
        pointer, copy = ctypes.c_void_p(), ctypes.create_string_buffer(handle, HANDLE)
        open_ = bind("all_reduce", "transect_peer_open", "pp")
        _check("opened", open_(ctypes.addressof(copy), ctypes.addressof(pointer)))
        assert pointer.value is not None
        return pointer.value

    @staticmethod
    def close(address: int) -> None:
        """Let go of the memory of another process."""
        _check("closed", bind("all_reduce", "transect_peer_close", "p")(address))

    def free(self) -> None:
        """Give the memory back, when no other process has it open."""
        _check("freed", bind("all_reduce", "transect_peer_free", "p")(self.address))


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """One piece on each rank of a group (``parallel/shared_memory.py`` makes and frees it).

    Attributes:
        addresses: of all ranks' pieces, in the order of the group, as this process sees them.
        own: this rank's.
    """

    addresses: list[int]
    own: PeerMemory


def memory_at(address: int, nbytes: int) -> Tensor:
    """View memory of the current GPU as bytes; it must outlive the tensor."""
    return torch.as_tensor(_Memory(address, nbytes), device="cuda")


class _Memory:
    """Bytes of a GPU in the form that torch takes over."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"memory of a GPU could not be {what} between processes: CUDA error {code}")
