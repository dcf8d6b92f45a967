"""A scripted HTTP server: each request gets the raw bytes that a test gives, in pieces, at times the test decides."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field


def event(text=None, *, reason=None, usage=None):
    """One completions event as bytes."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": reason}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def chunked(*pieces):
    """An event stream in chunked encoding, one chunk a piece."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


def answer(tokens, prompt_tokens=3):
    """A whole streamed answer of so many tokens."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    pieces = [event(f" {i}") for i in range(tokens)]
    return chunked(*pieces, event("", reason="length"), event(usage=usage), b"data: [DONE]\n\n")


@dataclass
class Server:
    """``script(body)`` returns the pieces to send; a float among them is a pause, an event is waited for,
    None closes the connection."""

    script: object = None
    bodies: list = field(default_factory=list)
    heads: list = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most: int = 0
    url: str = ""

    async def handle(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")), 0
                )
                body = json.loads(await reader.readexactly(length) or b"null")
                self.heads.append(head)
                self.bodies.append(body)
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    for piece in self.script(body):
                        if piece is None:
                            writer.close()
                            return
                        if isinstance(piece, asyncio.Event):
                            await piece.wait()
                        elif isinstance(piece, float):
                            await asyncio.sleep(piece)
                        else:
                            writer.write(piece)
                            await writer.drain()
                finally:
                    self.running -= 1
        writer.close()
