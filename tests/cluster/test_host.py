"""The part of a replica between its engine and the router."""

import asyncio
from types import SimpleNamespace

from transect.cluster import links
from transect.cluster.host import Relay
from transect.engine.frontends import wire
from transect.engine.numerics import Numerics

READY = wire.Ready(100, 4, 10, 8, [0], 1000, "", 0.0, Numerics({}, True))


class Socket:
    """An engine that answers ``NewCaller`` with two messages at once."""

    def __init__(self):
        self._messages = asyncio.Queue()

    async def send(self, data):
        assert isinstance(wire.decode_to_engine(data), wire.NewCaller)
        for message in (READY, wire.Outputs([], b"the head of its log")):
            self._messages.put_nowait(wire.encode(message))

    async def recv(self):
        return await self._messages.get()


class Link:
    """A router's end; ``sent``: messages of the engine."""

    def __init__(self):
        self.sent = []

    def put(self, kind, data):
        assert kind == links.ENGINE
        self.sent.append(wire.decode_from_engine(data))

    async def receive(self):
        await asyncio.Event().wait()


async def test_no_message_after_ready_is_lost():
    relay = Relay(SimpleNamespace(socket=Socket(), process=SimpleNamespace(wait=asyncio.Event().wait)))
    link = Link()
    carrying = asyncio.create_task(relay.carry(link, lambda message: None))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [type(message) for message in link.sent] == [wire.Ready, wire.Outputs]
    carrying.cancel()
    for task in relay._tasks:
        task.cancel()
    await asyncio.gather(carrying, *relay._tasks, return_exceptions=True)
