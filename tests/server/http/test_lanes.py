"""Threads that clients share."""

import asyncio
import threading

import pytest

from transect.server.http.clients import Clients, current_client
from transect.server.http.lanes import in_lane
from transect.text.grammar.fair_pool import FairPool


async def test_a_client_that_sends_much_waits_for_its_own_work():
    pool, free, order = FairPool(1, "test"), threading.Event(), []

    def work(number):
        free.wait(60)
        order.append((current_client().name, number))
        return number

    async def send(address, count):
        Clients(()).of({"headers": [], "client": (address, 1)})
        return await asyncio.gather(*(in_lane(pool, 100, work, number) for number in range(count)))

    many = asyncio.create_task(send("10.0.0.1", 9))
    while not pool._running:
        await asyncio.sleep(0.001)
    one = asyncio.create_task(send("10.0.0.2", 1))
    while len(pool._waiting) < 2:
        await asyncio.sleep(0.001)
    free.set()
    assert (await many, await one) == (list(range(9)), [0])
    assert order.index(("10.0.0.2", 0)) < 3
    pool.close()


async def test_errors_reach_the_caller():
    pool = FairPool(1, "test")
    with pytest.raises(ValueError, match="no number"):
        await in_lane(pool, 1, int, "no number")
    pool.close()
