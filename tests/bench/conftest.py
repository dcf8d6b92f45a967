"""The scripted server for load tests."""

import asyncio

import pytest
from scripted_server import Server


@pytest.fixture
async def server():
    made = Server()
    listening = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield made
    listening.close()
