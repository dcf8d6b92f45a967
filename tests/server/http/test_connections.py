"""Clients that send half a request, too many of them, and what is not HTTP: over real sockets, in this process."""

import asyncio
import errno
import functools
import json
import logging
import os
import resource
import signal
import socket
import struct

import pytest
import uvicorn
from uvicorn.server import ServerState

from transect.server.http import connections
from transect.server.http.connections import log_shortages_rarely, most_connections

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


async def connect(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def answer(reader):
    """(status, headers, JSON) of an answer, or None where the connection was closed without one."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers, json.loads(body)


def error_of(found, status):
    assert found is not None and found[0] == status, found
    assert found[1]["connection"] == "close"
    assert set(found[2]["error"]) == {"message", "type", "param", "code"}
    return found[2]["error"]


@pytest.mark.parametrize(
    ("sent", "part"),
    [(b"POST /v1/comp", "head"), (HEAD + b"content-length: 50\r\n\r\n{", "body")],
)
async def test_half_a_request_is_answered_after_a_while(serving, sent, part):
    async def during(port):
        reader, writer = await connect(port, sent)
        error = error_of(await answer(reader), 408)
        assert error["code"] == "receive_timeout" and f"the {part} of the request" in error["message"]
        assert await reader.read() == b""
        writer.close()

    assert await serving(during, receive_timeout_s=0.2) == 0


async def test_a_connection_without_a_request_is_closed_without_a_word(serving):
    async def during(port):
        reader, writer = await connect(port)
        assert await reader.read() == b""
        writer.close()

    await serving(during, receive_timeout_s=0.2)


async def test_a_connection_ends_when_no_next_request_comes(serving):
    async def during(port):
        reader, writer = await connect(port, GET % b"/health")
        assert (await answer(reader))[0] == 200
        assert await asyncio.wait_for(reader.read(), 4) == b""
        writer.close()

    await serving(during, keep_alive_s=0)


async def test_half_of_a_second_request_on_a_connection_is_bounded_too(serving):
    async def during(port):
        reader, writer = await connect(port, GET % b"/health")
        assert (await answer(reader))[0] == 200
        writer.write(b"GET /hea")
        assert error_of(await answer(reader), 408)["code"] == "receive_timeout"
        writer.close()

    await serving(during, receive_timeout_s=0.2)


async def test_a_body_that_keeps_coming_is_waited_for(serving, monkeypatch):
    """At the rate that is asked for it may take longer than the time for its beginning."""
    monkeypatch.setattr(connections, "BODY_BYTES_PER_S", 1)
    body = json.dumps({"prompt": "a" * 100, "max_tokens": 1}).encode()

    async def during(port):
        reader, writer = await connect(port, HEAD + b"content-length: %d\r\n\r\n" % len(body))
        writer.write(body[:20])
        await asyncio.sleep(0.7)
        writer.write(body[20:])
        assert (await answer(reader))[0] == 200
        writer.close()

    await serving(during, receive_timeout_s=0.5)


async def test_a_slow_answer_is_no_slow_request(serving, engine):
    async def during(port):
        body = json.dumps({"prompt": "HANG", "max_tokens": 9}).encode()
        reader, writer = await connect(port, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        while not engine.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        engine.go.set()
        assert (await answer(reader))[0] == 200
        writer.close()

    await serving(during, receive_timeout_s=0.1)


async def test_what_is_half_sent_does_not_hold_up_the_end(serving, engine):
    """SIGTERM: clients that are still sending hear at once that the server goes; the grace is for what runs."""

    async def during(port):
        for sent in (b"", b"GET /v1/mo", HEAD + b"content-length: 50\r\n\r\n{"):
            waiting.append(await connect(port, sent))
        _, writer = await connect(port, GET % b"/v1/models")
        reader, last = await connect(port, GET % b"/health")
        assert (await answer(reader))[0] == 200  # what came before has been read by now
        writer.close()
        last.close()

    waiting = []
    assert await asyncio.wait_for(serving(during, grace_s=3600), 60) == 0
    found = [await answer(reader) for reader, _ in waiting]
    assert found[0] is None
    assert [error_of(each, 503)["code"] for each in found[1:]] == ["draining", "draining"]
    for _, writer in waiting:
        writer.close()


async def test_beyond_the_limit_only_probes_are_answered(serving):
    async def during(port):
        held = [await connect(port) for _ in range(2)]
        await asyncio.sleep(0.05)
        reader, writer = await connect(port, GET % b"/v1/models")
        found = await answer(reader)
        assert error_of(found, 503)["code"] == "too_many_connections" and found[1]["retry-after"] == "1"
        probe, probing = await connect(port, GET % b"/health")
        assert (await answer(probe))[0] == 200
        more = [await connect(port) for _ in range(connections.SPARE)]
        last, ending = await connect(port, GET % b"/health")
        assert await answer(last) is None
        for _, each in (*held, *more, (None, writer), (None, probing), (None, ending)):
            each.close()
        while True:  # there is room again
            reader, writer = await connect(port, GET % b"/v1/models")
            found = await answer(reader)
            writer.close()
            if found is not None and found[0] == 200:
                break

    await serving(during, max_connections=2)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\r\n\r\n", b"GET /health\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000]
)
async def test_what_is_not_http_is_a_400_in_openai_s_shape(serving, caplog, sent):
    async def during(port):
        reader, writer = await connect(port, sent)
        assert error_of(await answer(reader), 400)["code"] == "invalid_http"
        writer.close()

    with caplog.at_level(logging.WARNING):
        await serving(during)
    assert not caplog.records


async def test_sighup_ends_streams_in_good_order(serving, engine):
    async def during(port):
        body = json.dumps({"prompt": "HANG", "max_tokens": 9, "stream": True}).encode()
        reader, writer = await connect(port, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        while not engine.running:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        engine.go.set()
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert await serving(during) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_sighup_stays_ignored_where_it_is(serving):
    async def during(port):
        os.kill(os.getpid(), signal.SIGHUP)
        reader, writer = await connect(port, GET % b"/health")
        assert (await answer(reader))[2]["state"] == "ok"
        writer.close()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert await serving(during) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_shortages_of_descriptors_are_logged_rarely(caplog):
    now = [0.0]
    handle = log_shortages_rarely(lambda: now[0])
    context = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
    }
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.ERROR):
        for _ in range(5000):
            handle(loop, context)
        assert len(caplog.records) == 1 and "ulimit -n" in caplog.text and "Too many open files" in caplog.text
        now[0] = 61.0
        handle(loop, context)
        assert len(caplog.records) == 2
        handle(loop, {"message": "something else", "exception": OSError(1, "x")})
        assert len(caplog.records) == 3
    loop.close()


def test_connections_leave_descriptors_for_the_rest():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        limit = most_connections(None)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised == min(hard, connections.MOST_DESCRIPTORS)
        assert limit == max(1, raised - connections.KEPT_BACK - connections.SPARE)
        assert most_connections(5) == 5 and most_connections(10**9) == limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_sighup_replaces_engines_where_the_caller_can(serving, engine, caplog):
    replaced = []

    async def reload(engine):
        replaced.append(engine)
        if len(replaced) == 1:
            raise ValueError("the settings are at fault")

    async def during(port):
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGHUP)
            while len(replaced) < count:
                await asyncio.sleep(0.01)
        reader, writer = await connect(port, GET % b"/health")
        assert (await answer(reader))[2]["state"] == "ok"
        writer.close()

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert await serving(during, reload=reload) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert replaced == [engine] * 2
    assert "reload failed, and the engines stay: the settings are at fault" in caplog.text


async def test_nothing_is_written_to_a_client_that_has_gone(caplog):
    done = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it leaves with a reset
        client.close()
        for _ in range(20):  # all in one pass of the event loop, which has not heard of that yet
            await send({"type": "http.response.body", "body": b"token", "more_body": True})
        done.set()

    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    made = functools.partial(
        connections.Connection, connections.Limits(9, 5.0), config=config, server_state=ServerState(), app_state={}
    )
    async with await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0) as server:
        client = socket.create_connection(server.sockets[0].getsockname())
        client.sendall(GET % b"/")
        await asyncio.wait_for(done.wait(), 60)
    assert "socket.send() raised exception." not in caplog.text
