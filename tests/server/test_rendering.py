"""A chat template that does not end costs its own request, and nothing else."""

import asyncio
import os
import signal

import httpx
import pytest

from transect.server import process
from transect.server.app import create_app
from transect.server.options import ServerOptions
from transect.server.process import bind, serve, url_of
from transect.server.rendering import RenderApart
from transect.text.chat_template import ChatTemplate

NESTED = "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
SOURCE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if messages[0].content == 'LOOP' %}"
    "{% set ns = namespace(x=['a'], y=['a']) %}" + NESTED + "{{ ns.x == ns.y }}{% endif %}"
)
OPTIONS = ServerOptions(model_names=("m",), grace_s=0.2)


def chat(text):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 3}


@pytest.fixture
def renderer():
    renderer = RenderApart(workers=2, time_limit_s=0.5)
    yield renderer
    renderer.close()


async def test_endless_templates_leave_room_for_others(engine, renderer):
    engine.chat_template = ChatTemplate(SOURCE)
    app = create_app(engine, OPTIONS, renderer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s", timeout=60) as client:
        endless = [asyncio.create_task(client.post("/v1/chat/completions", json=chat("LOOP"))) for _ in range(3)]
        await asyncio.sleep(0)
        good = await client.post("/v1/chat/completions", json=chat("Hi"))
        assert (await client.get("/health")).status_code == 200
        assert good.status_code == 200 and good.json()["usage"]["prompt_tokens"] == len("[user]Hi")
        for each in await asyncio.gather(*endless):
            error = each.json()["error"]
            assert each.status_code == 400 and error["code"] == "chat_template_error"
            assert "asks for too much: it was ended" in error["message"]


async def test_a_rendering_that_does_not_end_does_not_keep_the_server(engine, monkeypatch):
    renderers = []

    def patient():
        renderers.append(RenderApart(time_limit_s=3600))
        return renderers[0]

    async def start():
        return engine

    async def shutdown():
        engine.state = "dead"

    async def during(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat("LOOP")))
            while (await client.get("/health")).json()["in_flight"] == 0:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.gather(asking, return_exceptions=True)

    monkeypatch.setattr(process, "RenderApart", patient)
    monkeypatch.setattr(process, "SETTLE_S", 0.3)
    engine.chat_template, engine.shutdown = ChatTemplate(SOURCE), shutdown
    sock, tasks = bind("127.0.0.1", 0), []
    ready = lambda _: tasks.append(asyncio.create_task(during(url_of(sock))))  # noqa: E731
    assert await asyncio.wait_for(serve(start, OPTIONS, sock, ready=ready), 60) == 0
    await asyncio.gather(*tasks)
    assert [worker.pid for worker in renderers[0]._workers] == [None, None]
