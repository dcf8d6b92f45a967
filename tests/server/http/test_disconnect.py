"""Ending work whose client has gone away."""

import asyncio

import pytest

from transect.server.http.lifetime import ClientGone, unless_disconnected


async def never():
    await asyncio.Event().wait()


async def test_work_does_not_queue_behind_others():
    order = []
    asyncio.get_running_loop().call_soon(order.append, "another request")

    async def work():
        order.append("work")
        return 7

    assert await unless_disconnected(never, work()) == 7
    assert order == ["work"]


async def test_the_work_of_a_client_that_leaves_ends_before_the_caller_goes_on():
    ended = []

    async def leave():
        return {"type": "http.disconnect"}

    async def work():
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(ClientGone):
        await unless_disconnected(leave, work())
    assert ended and asyncio.current_task().cancelling() == 0


async def test_who_cancels_the_request_itself_is_not_told_of_a_client():
    task = asyncio.ensure_future(unless_disconnected(never, never()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    await asyncio.sleep(0)
    assert all(each.done() for each in left), "nobody watches any more"
