"""Messages between the grader and its child: msgpack with tensors, preceded by a length. Nothing in them can run.

The child runs a stranger's program, so the grader never unpickles what it sends.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

TENSOR = 1
MOST_BYTES = 1 << 30


class _Sent(msgspec.Struct):
    dtype: str
    shape: list[int]
    stride: list[int]
    data: memoryview


class Ended(Exception):
    """The other side has closed the connection."""


def send(connection: socket.socket, message: Any) -> None:
    """Send one message. Raises TypeError if it holds anything but plain values and tensors."""
    data = msgspec.msgpack.encode(message, enc_hook=_encode)
    connection.sendall(struct.pack("<Q", len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """Receive the next message.

    Raises:
        Ended: there is no other side any more.
        TimeoutError: the connection's timeout is over.
        ValueError: this is not a message.
    """
    (size,) = struct.unpack("<Q", _exactly(connection, 8))
    if size > MOST_BYTES:
        raise ValueError("the message is too large")
    try:
        return msgspec.msgpack.decode(_exactly(connection, size), ext_hook=_decode)
    except (msgspec.MsgspecError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"the message cannot be read: {error}") from error


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:], size - got)
        if not count:
            raise Ended
        got += count
    return data


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        held = value.detach().cpu()
        span = sum((n - 1) * s for n, s in zip(held.shape, held.stride(), strict=True)) + 1 if held.numel() else 0
        flat = held.as_strided((span,), (1,)).contiguous().view(torch.uint8) if span else held.new_empty(0)
        head = {"dtype": str(held.dtype)[6:], "shape": list(held.shape), "stride": list(held.stride())}
        return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode({**head, "data": flat.numpy().data}))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode(code: int, data: memoryview) -> Any:
    if code != TENSOR:
        raise ValueError(f"unknown kind {code}")
    head = msgspec.msgpack.decode(data, type=_Sent)
    dtype = getattr(torch, head.dtype)
    flat = torch.empty(head.data.nbytes, dtype=torch.uint8)  # aligned, and the only copy
    flat.numpy()[:] = np.frombuffer(head.data, np.uint8)
    return flat.view(dtype).as_strided(head.shape, head.stride) if head.data else torch.empty(head.shape, dtype=dtype)
