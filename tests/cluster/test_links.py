"""Links prove to both ends that the other one knows the fleet's key, and bound what strangers can send."""

import asyncio
import ssl
import subprocess

import pytest

from transect.cluster import links
from transect.cluster.links import FleetLink, LinkError

KEY = b"k" * 32


async def listening(router):
    """Serve ``router(reader, writer)`` on a free port."""
    server = await asyncio.start_server(router, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def both(router_key=KEY, replica_key=KEY):
    """The errors, or the links, of both ends."""
    found = asyncio.get_running_loop().create_future()

    async def router(reader, writer):
        try:
            found.set_result(await links.accept(reader, writer, router_key))
        except LinkError as error:
            found.set_result(error)

    server, port = await listening(router)
    try:
        replica = await links.dial("127.0.0.1", port, replica_key, name="r", generation=3, pid=7)
    except LinkError as error:
        replica = error
    accepted = await asyncio.wait_for(found, 30)
    server.close()
    return accepted, replica


async def test_two_ends_with_one_key_exchange_frames():
    router, replica = await both()
    assert (router.peer.name, router.peer.generation, router.peer.pid) == ("r", 3, 7)
    replica.put(links.ENGINE, b"x" * 100_000)
    replica.say(links.Heartbeat())
    assert await router.receive() == (links.ENGINE, b"x" * 100_000)
    assert isinstance(await router.hear(links.Heartbeat), links.Heartbeat)
    replica.close()
    with pytest.raises(LinkError, match="closed"):
        await router.receive()
    router.close()


async def test_a_replica_with_another_key_is_refused():
    router, replica = await both(replica_key=b"o" * 32)
    assert isinstance(router, LinkError) and isinstance(replica, LinkError)
    assert "does not have this fleet's key" in str(replica)


async def test_a_router_that_does_not_know_the_key_is_left():
    """A program in the router's place, which accepts any proof."""

    async def impostor(reader, writer):
        link = FleetLink(reader, writer)
        link.say(links.Challenge(links.PROTOCOL, b"n" * 32))
        await link.hear(links.Hello)
        link.say(links.Welcome(b"p" * 32))

    server, port = await listening(impostor)
    with pytest.raises(LinkError, match="the router does not have this fleet's key"):
        await links.dial("127.0.0.1", port, KEY, name="r")
    server.close()


async def test_a_proof_is_of_no_use_twice():
    """The bytes of an accepted replica, sent again, are refused: the router's nonce is another."""
    said = []

    async def router(reader, writer):
        link = FleetLink(reader, writer)
        link.say(links.Challenge(links.PROTOCOL, b"n" * 32))
        said.append(await link.hear(links.Hello))
        link.close()

    server, port = await listening(router)
    with pytest.raises(LinkError):
        await links.dial("127.0.0.1", port, KEY, name="r")
    server.close()
    results = []

    async def real(reader, writer):
        try:
            await links.accept(reader, writer, KEY)
        except LinkError as error:
            results.append(str(error))

    server, port = await listening(real)
    link = FleetLink(*await asyncio.open_connection("127.0.0.1", port))
    await link.hear(links.Challenge)
    link.say(said[0])
    with pytest.raises(LinkError, match="does not have this fleet's key"):
        await link.hear(links.Welcome)
    assert results
    link.close()
    server.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff\x01", b"\x01\x00\x00\x00\x01\xc1", b"\x02\x00\x00\x00\x00hi"],
    ids=["http", "long", "damaged", "an engine's message"],
)
async def test_strangers_are_refused_before_they_cost_memory(sent):
    found = asyncio.get_running_loop().create_future()

    async def router(reader, writer):
        try:
            await links.accept(reader, writer, KEY)
        except LinkError as error:
            found.set_result(str(error))

    server, port = await listening(router)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await asyncio.wait_for(found, 30)
    writer.close()
    server.close()


async def test_no_router_is_an_error_with_the_address():
    server, port = await listening(lambda reader, writer: None)
    server.close()
    await server.wait_closed()
    with pytest.raises(LinkError, match=f"no router answers at 127.0.0.1:{port}"):
        await links.dial("127.0.0.1", port, KEY, name="r")


async def test_with_tls_the_router_shows_its_certificate(tmp_path):
    certificate, key = str(tmp_path / "c.pem"), str(tmp_path / "k.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*made, *named], check=True, capture_output=True)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(certificate, key)

    async def router(reader, writer):
        (await links.accept(reader, writer, KEY)).say(links.Heartbeat())

    server = await asyncio.start_server(router, "127.0.0.1", 0, ssl=shown)
    port = server.sockets[0].getsockname()[1]
    trusted = ssl.create_default_context(cafile=certificate)
    link = await links.dial("127.0.0.1", port, KEY, name="r", tls=trusted)
    assert isinstance(await link.hear(links.Heartbeat), links.Heartbeat)
    link.close()
    with pytest.raises(LinkError, match="CERTIFICATE_VERIFY_FAILED"):
        await links.dial("127.0.0.1", port, KEY, name="r", tls=ssl.create_default_context())
    server.close()
