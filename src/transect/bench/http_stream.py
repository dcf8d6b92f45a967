"""A small HTTP/1.1 client that does one thing: POST a body, and time each server-sent event as its bytes arrive.

It is written for measuring. It takes the time when the socket has data, before it parses anything, and an event costs a
few microseconds, so one core carries hundreds of streams. Connections are kept and used again; their number is not
limited. There are no redirects, no proxies and no compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

OnEvent = Callable[[bytes, float], None]
MOST_HEAD_BYTES = 64 * 1024


class RequestFailed(Exception):
    """A request that got no complete answer. ``kind`` is one of a few words, for counting."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an answer; only the status if it was an event stream."""

    status: int
    body: bytes = b""


class HttpClient:
    """Connections to one server.

    Args:
        url: ``http://host[:port]`` or ``https://...``; a path is put in front of every request's.
        headers: sent with every request.
        timeout_s: for a whole request; None for no limit.

    Raises:
        ValueError: it is not such a URL.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, timeout_s: float | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server: give a URL such as http://127.0.0.1:8000")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        if any("\r" in text or "\n" in text for item in fields.items() for text in item):
            raise ValueError("a header holds a line break: check the API key")
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Reply:
        """Send a GET request.

        Raises:
            RequestFailed: as for ``post``.
        """
        return await self._request(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._fields}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> Reply:
        """Send a POST request with JSON. ``on_event(data, moment)`` is called for each event of an event stream,
        ``moment`` as ``time.perf_counter`` at the arrival of its bytes.

        Raises:
            RequestFailed: ``connect``, ``timeout``, ``disconnected`` or ``bad reply``.
        """
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._fields}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._request(head.encode() + body, on_event)

    async def _request(self, message: bytes, on_event: OnEvent | None) -> Reply:
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    connection = self._take_idle()
                    fresh = connection is None
                    if connection is None:
                        connection = await self._connect()
                    try:
                        reply = await connection.run(message, on_event)
                    except RequestFailed:
                        # A kept connection that the server has closed meanwhile says nothing about this request.
                        if fresh or connection.heard:
                            raise
                        continue
                    finally:
                        if connection.reusable:
                            self._idle.append(connection)
                        else:
                            connection.close()
                    return reply
        except TimeoutError:
            raise RequestFailed("timeout", f"no complete answer within {self._timeout_s:g} s") from None

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise RequestFailed("connect", str(error.strerror or error)) from None
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. ``heard``: True if bytes of an answer to the last request have arrived."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._done: asyncio.Future[Reply] | None = None
        self._feed: Callable[[bytes, float], None] = self._head
        self._buffer = b""
        self._events: _Events | None = None
        self._on_event: OnEvent | None = None
        self._parts: list[bytes] = []
        self._status = 0
        self._left = 0
        self._keep = True
        self.open = True
        self.heard = False
        self.reusable = False

    async def run(self, message: bytes, on_event: OnEvent | None) -> Reply:
        self._done = asyncio.get_running_loop().create_future()
        self._buffer, self._parts, self._events = b"", [], None
        self._feed, self._on_event = self._head, on_event
        self.heard = self.reusable = False
        self._transport.write(message)
        try:
            return await self._done
        finally:
            self._done = None

    def close(self) -> None:
        self._transport.close()

    # ---- what asyncio calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done():
            self.reusable = False  # unexpected bytes
            self.close()
            return
        self.heard = True
        try:
            self._feed(data, now)
        except (ValueError, IndexError) as error:
            self._fail("bad reply", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = self.reusable = False
        if self._done is not None and not self._done.done():
            if self.heard and self._feed == self._until_close and error is None:
                self._finish()
            else:
                self._fail("disconnected", "the server closed the connection in the middle of an answer")

    # ---- the answer --------------------------------------------------------------------------------------------------

    def _head(self, data: bytes, now: float) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            if len(self._buffer) > MOST_HEAD_BYTES:
                raise ValueError("its headers do not end")
            return
        self._buffer = b""
        first, *lines = head.split(b"\r\n")
        if not first.startswith(b"HTTP/1."):
            raise ValueError("it is not an HTTP/1.1 answer")
        self._status = int(first.split(b" ", 2)[1])
        fields = {name.strip().lower(): value.strip().lower() for name, _, value in (f.partition(b":") for f in lines)}
        self._keep = fields.get(b"connection") != b"close" and first.startswith(b"HTTP/1.1")
        if self._on_event is not None and fields.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._events = _Events(self._on_event)
        if fields.get(b"transfer-encoding") == b"chunked":
            self._feed = self._chunked
        elif b"content-length" in fields:
            self._left = int(fields[b"content-length"])
            self._feed = self._counted
        else:
            self._feed, self._keep = self._until_close, False
        if rest or (self._feed == self._counted and self._left == 0):
            self._feed(rest, now)

    def _chunked(self, data: bytes, now: float) -> None:
        buffer = self._buffer + data if self._buffer else data
        start = 0
        while True:
            line = buffer.find(b"\r\n", start)
            if line < 0:
                break
            size = int(buffer[start:line].partition(b";")[0], 16)
            end = line + 2 + size
            if size == 0:
                tail = buffer.find(b"\r\n", line + 2) if buffer[line + 2 : line + 4] != b"\r\n" else line + 2
                if tail < 0 or len(buffer) < tail + 2:
                    break
                self._finish()
                return
            if len(buffer) < end + 2:
                break
            self._take(buffer[line + 2 : end], now)
            start = end + 2
        self._buffer = buffer[start:]

    def _counted(self, data: bytes, now: float) -> None:
        self._left -= len(data)
        self._take(data, now)
        if self._left < 0:
            raise ValueError("it is longer than its Content-Length")
        if self._left == 0:
            self._finish()

    def _until_close(self, data: bytes, now: float) -> None:
        self._take(data, now)

    def _take(self, data: bytes, now: float) -> None:
        if self._events is None:
            self._parts.append(data)
        else:
            self._events.feed(data, now)

    def _finish(self) -> None:
        assert self._done is not None
        self.reusable = self._keep and self.open
        self._done.set_result(Reply(self._status, b"".join(self._parts)))

    def _fail(self, kind: str, detail: str) -> None:
        if self._done is not None and not self._done.done():
            self.reusable = False
            self._done.set_exception(RequestFailed(kind, detail))


class _Events:
    """Cuts an event stream into the data of its events."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._on_event(event[5:].lstrip(), now)
            else:
                lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    self._on_event(b"\n".join(lines), now)
