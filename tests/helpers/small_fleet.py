"""A fleet in one process: its router and hosts, and engine processes without a model (``stub_engine``)."""

import asyncio
import contextlib
import dataclasses

from transect import SamplingParams
from transect.cluster.fleet import RemoteReplicas
from transect.cluster.host import Host

PROMPT = list(range(65, 85))


class Small:
    """A fleet in this process: its router and some hosts, with engine processes of their own."""

    def __init__(self, settings):
        self.settings, self.hosts, self.port = settings, {}, 0
        self.fleet = None

    async def open(self, count):
        self.fleet = await RemoteReplicas.listen(self.settings)
        self.port = self.fleet.port
        await asyncio.gather(*(self.add(f"replica-{index}") for index in range(count)))
        await self.until(lambda: len(self.fleet.alive()) == count)

    async def add(self, name, generation=0):
        async def find():
            return "127.0.0.1", self.port

        self.hosts[name] = await Host.start(self.settings, name, find, generation)
        return self.hosts[name]

    async def reopen(self):
        """Replace the router by a new one on the same port, as after its death."""
        links = dataclasses.replace(self.settings.links, port=self.port)
        self.fleet = await RemoteReplicas.listen(dataclasses.replace(self.settings, links=links))

    def engine(self, name):
        return next(each for each in self.fleet.engines if each.name == name and each.death is None)

    def having(self, request_id):
        """Name of the replica that has a request."""
        return self.fleet._where[request_id].name

    async def run(self, name, seen=lambda updates: None, **params):
        """Text, tokens and end of a request."""
        updates = []
        params = SamplingParams(**{"seed": 1, "max_tokens": 60} | params)
        async for update in self.fleet.stream(PROMPT, params, name):
            updates.append(update)
            seen(updates)
        choice = updates[-1].final.outputs[0]
        assert [token for update in updates for token in update.token_ids] == choice.token_ids
        return choice.text, tuple(choice.token_ids), choice.finish_reason

    async def begun(self, name, **params):
        """Start a request; its task and the name of its replica, after the first update."""
        where = asyncio.get_running_loop().create_future()

        def seen(updates):
            if not where.done():
                where.set_result(self.having(name))

        task = asyncio.create_task(self.run(name, seen, **params))
        return task, await where

    async def until(self, condition):
        async with asyncio.timeout(200):
            while not condition():
                await asyncio.sleep(0.01)

    async def close(self):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(host.retire(0.0) for host in self.hosts.values()))
        if self.fleet is not None:
            await self.fleet.shutdown()
