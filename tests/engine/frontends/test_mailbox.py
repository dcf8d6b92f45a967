"""Items to the one task that waits for them."""

import asyncio

from transect.engine.frontends.mailbox import Mailbox


async def test_what_came_meanwhile_comes_together_and_in_order():
    box = Mailbox()
    box.put(1)
    box.put(2)
    assert await box.take() == [1, 2]
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    box.put(3)
    box.put(4)
    assert await waiting == [3, 4]


async def test_a_taker_that_was_cancelled_loses_nothing():
    box = Mailbox()
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    waiting.cancel()
    box.put(1)
    await asyncio.gather(waiting, return_exceptions=True)
    assert await box.take() == [1]
