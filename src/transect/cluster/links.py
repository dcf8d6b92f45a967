"""Links between a fleet's router and its replicas: frames over TCP, after both ends have proved that they know the key.

A replica dials the router. The router sends a nonce; the replica answers with its own, and the HMAC of both; the router
answers with another HMAC of both. The key itself never travels. Frames are authenticated by the connection alone: give
certificates (TLS), or a network of the fleet's own, where others could change packets.

A frame is its length (4 bytes, little endian), one byte for its kind, and the bytes of a message: one of the engine's
(``engine/frontends/wire.py``), or one of the link's own, defined here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import ssl
import time
from typing import Any

import msgspec

PROTOCOL = 1
"""Version of these messages; both ends must have the same."""
ENGINE, LINK = 0, 1
"""Kinds of frames."""
HEARTBEAT_S = 0.5
"""Seconds between two signs of life of a replica's host."""
HANDSHAKE_S = 10.0
"""Seconds for a handshake."""
MOST_HANDSHAKE, MOST_FRAME = 4096, 1 << 30
"""Longest frame before and after the handshake, in bytes."""


class Challenge(msgspec.Struct, tag="challenge"):
    """First message of the router."""

    protocol: int
    nonce: bytes


class Hello(msgspec.Struct, tag="hello"):
    """Answer of a replica."""

    nonce: bytes
    proof: bytes
    name: str
    """Name of the replica, the same after a restart of its engine."""
    generation: int
    """Number of the roll that started it."""
    clock: float
    """Seconds of the monotonic clock of its machine."""
    pid: int = 0
    """Process id of the engine on its machine."""


class Welcome(msgspec.Struct, tag="welcome"):
    """Proof of the router; the replica is part of the fleet."""

    proof: bytes


class Refusal(msgspec.Struct, tag="refusal"):
    """Reason why the router takes no such replica; it closes the connection."""

    reason: str


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Sign of life of a replica's host, which does not depend on the engine's steps."""


class EngineEnded(msgspec.Struct, tag="ended"):
    """Last message of a replica: its engine has ended, or leaves the fleet."""

    reason: str


class Retiring(msgspec.Struct, tag="retiring"):
    """Request of a replica for no further requests; the router answers ``Drained`` when it has none any more."""


class Drained(msgspec.Struct, tag="drained"):
    """The replica has no request any more."""


class LoadReport(msgspec.Struct, tag="load"):
    """Work of the replica as known to the router, sent once a second."""

    queued_tokens: int
    """Tokens that the engine still has to compute, prompts and answers."""
    waiting: int
    running: int
    kv: float
    """Share of KV blocks in use."""
    tokens_per_s: float
    """Tokens that the engine computes each second while it is busy; 0 if not known."""
    rate: float
    """Requests per second of the whole fleet."""


Message = Challenge | Hello | Welcome | Refusal | Heartbeat | EngineEnded | Retiring | Drained | LoadReport

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class LinkError(ConnectionError):
    """The link cannot be used; the message says why."""


class FleetLink:
    """One end of a connection, after ``dial`` or ``accept``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard = time.monotonic()
        """Time of the last frame, in seconds of the monotonic clock."""
        self.peer = Hello(b"", b"", "", 0, 0.0)
        """Introduction of the replica, at the router's end."""
        self._most = MOST_HANDSHAKE

    @property
    def closed(self) -> bool:
        """True once this end is closed."""
        return self._writer.is_closing()

    def put(self, kind: int, data: bytes) -> None:
        """Send a frame without waiting; dropped if the link is closed."""
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(4, "little") + bytes((kind,)) + data)

    def say(self, message: Message) -> None:
        """Send a message of the link's own."""
        self.put(LINK, _encode(message))

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame.

        Raises:
            LinkError: the other end is gone, or does not keep to the protocol.
        """
        try:
            head = await self._reader.readexactly(5)
            size = int.from_bytes(head[:4], "little")
            if size > self._most:
                raise LinkError(f"a frame of {size} bytes is longer than {self._most}")
            data = await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            if isinstance(error, LinkError):
                raise
            raise LinkError("the connection was closed") from None
        self.heard = time.monotonic()
        return head[4], data

    async def hear(self, *kinds: Any) -> Any:
        """Return the next message, which must be of the link's own and of one of these types.

        Raises:
            LinkError: it is not, or the other end is gone.
        """
        kind, data = await self.receive()
        message = read(data) if kind == LINK else None
        if isinstance(message, Refusal):
            raise LinkError(message.reason)
        if not isinstance(message, kinds):
            raise LinkError("the other end does not speak the protocol of a fleet")
        return message

    def close(self) -> None:
        """Close this end; frames that were put are still sent."""
        self._writer.close()

    def cut(self) -> None:
        """Close this end at once."""
        self._writer.transport.abort()

    def opened(self) -> None:
        """Allow frames of full length after the handshake."""
        self._most = MOST_FRAME


def read(data: bytes) -> Message:
    """Decode a message of the link's own.

    Raises:
        LinkError: it is none.
    """
    try:
        message: Message = _decode(data)
    except msgspec.MsgspecError:
        raise LinkError("the other end does not speak the protocol of a fleet") from None
    return message


def _proof(key: bytes, side: bytes, first: bytes, second: bytes, about: bytes = b"") -> bytes:
    return hmac.new(
        key, b"\0".join((side, first.hex().encode(), second.hex().encode(), about)), hashlib.sha256
    ).digest()


def _about(hello: Hello) -> bytes:
    return _encode(msgspec.structs.replace(hello, proof=b""))


async def dial(
    host: str, port: int, key: bytes, *, name: str, generation: int = 0, pid: int = 0, tls: ssl.SSLContext | None = None
) -> FleetLink:
    """Connect a replica to the router.

    Raises:
        LinkError: there is no router at this address, or it has another key or protocol.
    """
    link = None
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            link = FleetLink(*await asyncio.open_connection(host, port, ssl=tls))
            challenge = await link.hear(Challenge)
            if challenge.protocol != PROTOCOL:
                raise LinkError(f"the router has protocol {challenge.protocol} and this replica {PROTOCOL}")
            hello = Hello(secrets.token_bytes(32), b"", name, generation, time.monotonic(), pid)
            hello.proof = _proof(key, b"replica", challenge.nonce, hello.nonce, _about(hello))
            link.say(hello)
            welcome = await link.hear(Welcome)
            if not hmac.compare_digest(welcome.proof, _proof(key, b"router", challenge.nonce, hello.nonce)):
                raise LinkError("the router does not have this fleet's key")
        link.opened()
        return link
    except (OSError, TimeoutError) as error:
        if link is not None:
            link.cut()
        if isinstance(error, LinkError):
            raise
        reason = "no answer" if isinstance(error, TimeoutError) else error
        raise LinkError(f"no router answers at {host}:{port} ({reason})") from None


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> FleetLink:
    """Check a connection at the router's end.

    Raises:
        LinkError: it is none of this fleet's replicas; it was closed.
    """
    link = FleetLink(reader, writer)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            nonce = secrets.token_bytes(32)
            link.say(Challenge(PROTOCOL, nonce))
            hello = await link.hear(Hello)
            if not hmac.compare_digest(hello.proof, _proof(key, b"replica", nonce, hello.nonce, _about(hello))):
                raise LinkError("the replica does not have this fleet's key")
            link.say(Welcome(_proof(key, b"router", nonce, hello.nonce)))
        link.peer = hello
        link.opened()
        return link
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer"
        with contextlib.suppress(OSError):
            link.say(Refusal(reason))
        link.close()
        raise LinkError(reason) from None
