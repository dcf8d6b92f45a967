"""Binding, and the life of a server around the fake engine, in this process."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys

import httpx
import pytest

from transect.server.options import ServerOptions
from transect.server.process import bind, bind_unix, serve, url_of

OPTIONS = ServerOptions(model_names=("m",), grace_s=5)


def test_bind_to_any_port_and_its_url():
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")


def test_bind_errors_say_what_to_change():
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(ValueError, match="is in use: choose another with --port"):
            bind("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(ValueError, match="cannot listen on 203"):
        bind("203.0.113.7", 0)
    with pytest.raises(ValueError, match="--host"):
        bind("no.such.host.invalid", 0)


def test_two_servers_that_bound_the_same_port_before_listening(engine):
    """Both may bind while neither listens; the later one to listen is told so."""
    with bind("127.0.0.1", 0) as first:
        second = bind("127.0.0.1", first.getsockname()[1])
        first.listen()
        with pytest.raises(ValueError, match="is in use"):
            asyncio.run(run(engine, second, None))


async def run(engine, sock, during):
    """Serve with ``during(url)`` as what happens once the server is ready; returns the exit code."""
    ended = []

    async def shutdown():
        ended.append("shutdown")
        engine.state = "dead"
        engine.go.set()

    async def start():
        return engine

    engine.shutdown = shutdown
    tasks = []

    def ready(given):
        assert given is engine
        tasks.append(asyncio.create_task(during(url_of(sock))))

    code = await serve(start, OPTIONS, sock, ready=ready)
    await asyncio.gather(*tasks)
    assert "shutdown" in ended
    return code


def kill_self(which):
    os.kill(os.getpid(), which)


@pytest.mark.parametrize(("which", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_of_an_idle_server(engine, which, code):
    async def during(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            assert (await client.get("/health")).status_code == 200
        kill_self(which)

    assert asyncio.run(run(engine, bind("127.0.0.1", 0), during)) == code


def test_engine_death_ends_the_server(engine):
    async def during(url):
        engine.state = "dead"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            response = await client.get("/health")
        assert (response.status_code, response.json()["state"]) == (503, "dead")

    assert asyncio.run(run(engine, bind("127.0.0.1", 0), during)) == 1


def test_sigterm_waits_for_running_requests(engine):
    async def during(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "HANG", "max_tokens": 9}))
            while not engine.running:
                await asyncio.sleep(0.01)
            kill_self(signal.SIGTERM)
            while (await client.get("/health")).json()["state"] != "draining":
                await asyncio.sleep(0.01)
            engine.go.set()
            assert (await running).json()["choices"][0]["text"] == "Hello, w\N{REPLACEMENT CHARACTER}"

    assert asyncio.run(run(engine, bind("127.0.0.1", 0), during)) == 0


def test_a_second_signal_means_now(engine):
    async def during(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "HANG", "max_tokens": 9}))
            while not engine.running:
                await asyncio.sleep(0.01)
            kill_self(signal.SIGTERM)
            while (await client.get("/health")).json()["state"] != "draining":
                await asyncio.sleep(0.01)
            kill_self(signal.SIGTERM)
            await running

    assert asyncio.run(run(engine, bind("127.0.0.1", 0), during)) == 0


def test_signal_while_the_engine_starts(engine):
    cancelled = []

    async def start():
        kill_self(signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    code = asyncio.run(serve(start, OPTIONS, bind("127.0.0.1", 0), ready=lambda engine: pytest.fail("not ready")))
    assert code == 130 and cancelled


def test_engine_that_cannot_start():
    async def start():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        asyncio.run(serve(start, OPTIONS, bind("127.0.0.1", 0), ready=lambda engine: None))


def test_no_torch_in_the_server_process():
    program = (
        "import sys, transect.server.process, transect.engine.frontends.async_engine; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_a_unix_socket(engine, short_path):
    path = str(short_path / "socket")
    sock = bind_unix(path)
    assert os.stat(path).st_mode & 0o777 == 0o600

    async def during(url):
        assert url == f"unix:{path}"
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://server") as client:
            answer = await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5})
            assert answer.json()["choices"][0]["text"] == "Hello"
        os.kill(os.getpid(), signal.SIGTERM)

    assert asyncio.run(run(engine, sock, during)) == 0
    bind_unix(path).close()  # nobody listens there any more


def test_a_unix_socket_that_cannot_be_had(short_path):
    file = short_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match=r"cannot be bound .* in use"):
        bind_unix(str(file))
    assert file.read_text() == "x"
    taken = str(short_path / "taken")
    with bind_unix(taken) as sock:
        sock.listen()
        with pytest.raises(ValueError, match="cannot be bound"):
            bind_unix(taken)
    with pytest.raises(ValueError, match="--uds"):
        bind_unix(str(short_path / "no" / "folder"))


def test_tls(engine, tmp_path, monkeypatch):
    certificate, key = str(tmp_path / "c.pem"), str(tmp_path / "k.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*made, *named], check=True, capture_output=True)
    options = ServerOptions(model_names=("m",), ssl_certfile=certificate, ssl_keyfile=key)
    monkeypatch.setattr(sys.modules[__name__], "OPTIONS", options)
    sock = bind("127.0.0.1", 0)

    async def during(url):
        trusted = ssl.create_default_context(cafile=certificate)
        async with httpx.AsyncClient(verify=trusted) as client:
            assert (await client.get(url.replace("http:", "https:") + "/version")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)

    assert asyncio.run(run(engine, sock, during)) == 0
    with pytest.raises(ValueError, match="cannot be used"):
        ServerOptions(model_names=("m",), ssl_certfile=key)
    with pytest.raises(ValueError, match=r"^ssl_certfile nowhere cannot be used: there is no such file$"):
        ServerOptions(model_names=("m",), ssl_certfile="nowhere")
    with pytest.raises(ValueError, match="needs ssl_certfile"):
        ServerOptions(model_names=("m",), ssl_keyfile=key)
