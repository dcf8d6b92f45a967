"""The client of the load generator against raw bytes."""

import asyncio

import pytest
from scripted_server import answer, chunked, event

from transect.bench.http_stream import HttpClient, RequestFailed


async def post(client, **options):
    seen = []
    reply = await client.post("/v1/completions", b"{}", lambda data, now: seen.append(data))
    return reply, seen


@pytest.mark.parametrize("cut", [1, 2, 7, 10_000])
async def test_events_whatever_the_pieces(server, cut):
    whole = b"".join(chunked(b"data: one\n\nda", b"ta:two\r\n\r\n", b": comment\n\nevent: x\ndata: a\ndata: b\n\n"))
    server.script = lambda body: [whole[i : i + cut] for i in range(0, len(whole), cut)]
    reply, seen = await post(HttpClient(server.url))
    assert reply.status == 200 and seen == [b"one", b"two", b"a\nb"]


async def test_a_connection_is_used_again(server):
    server.script = lambda body: answer(2)
    client = HttpClient(server.url + "/prefix", {"Authorization": "Bearer k"})
    for _ in range(3):
        _, seen = await post(client)
        assert len(seen) == 5
    assert server.connections == 1
    assert server.heads[0].startswith(b"POST /prefix/v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in server.heads[0]
    client.close()


async def test_a_kept_connection_that_the_server_closed(server):
    server.script = lambda body: [*answer(1), None]
    client = HttpClient(server.url)
    for _ in range(2):
        assert len((await post(client))[1]) == 4
        await asyncio.sleep(0.01)
    assert server.connections == 2


async def test_plain_answers(server):
    server.script = lambda body: [b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\n", 0.01, b"wa", b"it"]
    reply, seen = await post(HttpClient(server.url))
    assert (reply.status, reply.body, seen) == (429, b"wait", [])
    server.script = lambda body: [b"HTTP/1.1 200 OK\r\n\r\nuntil", b" the end", None]
    assert (await HttpClient(server.url).get("/x")).body == b"until the end"
    server.script = lambda body: [b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"]
    assert (await HttpClient(server.url).get("/x")).status == 204


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([None], "disconnected"),
        ([*chunked(event("a"))[:2], None], "disconnected"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "bad reply"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "bad reply"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab"], "bad reply"),
        ([b"HTTP/1.1 200 OK\r\n", 0.5], "timeout"),
    ],
)
async def test_failures_have_a_kind(server, pieces, kind):
    server.script = lambda body: pieces
    with pytest.raises(RequestFailed) as caught:
        await post(HttpClient(server.url, timeout_s=0.2 if kind == "timeout" else 60))
    assert caught.value.kind == kind


async def test_nobody_there():
    with pytest.raises(RequestFailed) as caught:
        await post(HttpClient("http://127.0.0.1:1"))
    assert caught.value.kind == "connect"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_no_url(url):
    with pytest.raises(ValueError, match="give a URL such as"):
        HttpClient(url)


def test_no_line_break_gets_into_the_headers():
    with pytest.raises(ValueError, match="API key"):
        HttpClient("http://x", {"Authorization": "Bearer a\r\nX: y"})
