"""A server hands its listening socket to its successor: no connection is refused, and no stream is cut."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from stub_server import StubServer
from tiny_llm import save_tiny_llm

from transect.server.hand_over import Inherited, Successor
from transect.server.process import _leave_socket

TAKER = """
import sys
from transect.server.hand_over import Inherited
passed = Inherited()
assert not {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} & set(__import__("os").environ)
sock = passed.listening()
if "fail" in sys.argv:
    sys.exit(3)
passed.say_ready()
connection, _ = sock.accept()
connection.sendall(b"taken")
"""


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


async def test_a_successor_takes_a_connection_that_came_before_it(listening):
    with socket.create_connection(listening.getsockname()) as client:
        successor = Successor(listening, [sys.executable, "-c", TAKER])
        assert await successor.ready()
        assert await asyncio.to_thread(client.recv, 9) == b"taken"
    assert os.waitpid(successor.pid, 0)[1] == 0


async def test_a_successor_that_ends_before_it_is_ready_is_none(listening):
    assert not await Successor(listening, [sys.executable, "-c", TAKER, "fail"]).ready()


async def test_a_successor_that_is_not_ready_ends_with_its_parent(listening):
    successor = Successor(listening, [sys.executable, "-c", "import time; time.sleep(600)"])
    waiting = asyncio.create_task(successor.ready())
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    status = await asyncio.to_thread(os.waitpid, successor.pid, 0)
    assert os.waitstatus_to_exitcode(status[1]) == -signal.SIGTERM


def test_variables_for_another_process_are_left_aside(monkeypatch):
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert Inherited().listening() is None and "LISTEN_FDS" not in os.environ


def test_several_sockets_and_other_descriptors_are_refused(tmp_path):
    passed = Inherited()
    passed.sockets = [3, 4]
    with pytest.raises(ValueError, match="2 sockets were passed"):
        passed.listening()
    with open(tmp_path / "file", "w") as file:
        passed.sockets = [file.fileno()]
        with pytest.raises(ValueError, match="is not a socket"):
            passed.listening()
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        passed.sockets = [os.dup(datagrams.fileno())]
        with pytest.raises(ValueError, match="is not a stream socket"):
            passed.listening()


class Greeter(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"old")


@pytest.mark.parametrize("passes", range(5))
async def test_a_connection_is_accepted_or_left_to_the_successor_but_never_dropped(listening, passes):
    """The moments between a connection's acceptance and its first callback are passes of the event loop."""
    with listening.dup() as successor, socket.socket() as client:
        server = await asyncio.get_running_loop().create_server(Greeter, sock=listening)
        await asyncio.sleep(0)
        client.connect(successor.getsockname())
        for _ in range(passes):
            await asyncio.sleep(0)
        await _leave_socket(SimpleNamespace(servers=[server]), SimpleNamespace())
        try:
            with successor.accept()[0] as connection:
                connection.sendall(b"new")
        except BlockingIOError:
            assert passes > 0
        client.settimeout(60)
        assert client.recv(3) in (b"old", b"new")


class Clients(threading.Thread):
    """Requests one after another, each on a connection of its own and on one that is kept, until told to stop."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.stopping, self.errors = url, threading.Event(), []
        self.servers, self.texts = set(), set()

    def run(self):
        body = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
        with httpx.Client(base_url=self.url, timeout=120, trust_env=False) as kept:
            while not self.stopping.is_set():
                try:
                    for client, url in ((kept, ""), (httpx, self.url)):
                        response = client.post(f"{url}/v1/completions", json=body, timeout=120)
                        assert response.status_code == 200, response.text
                    self.texts.add(self.stream())
                    self.servers.add(httpx.get(f"{self.url}/health", timeout=120).json()["server_pid"])
                except Exception as error:
                    self.errors.append(error)

    def stream(self):
        """Return the text of a stream that takes a second."""
        body = {"prompt": [1, 2, 3], "max_tokens": 100, "seed": 1, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def until(self, servers):
        """Wait until that many servers have answered."""
        while len(self.servers) < servers and not self.errors:
            time.sleep(0.05)


def test_restarts_refuse_no_connection_and_cut_no_stream(tmp_path):
    """Under systemd the old server stops accepting and finishes, and connections wait in the socket for the new one.
    With ``transect reload --http`` the new server begins first. Clients ask all the time."""
    save_tiny_llm(tmp_path)
    servers, pids = [], []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
        try:
            servers.append(StubServer(tmp_path, "--grace", "60", listening=sock))
            url = servers[0].url
            assert servers[0].port == sock.getsockname()[1]
            clients = Clients(url)
            clients.start()
            clients.until(1)
            with socket.create_connection(sock.getsockname()) as silent:
                servers[0].process.terminate()
                assert servers[0].process.wait(60) == 0 and silent.recv(1) == b""
            servers.append(StubServer(tmp_path, listening=sock))
            clients.until(2)
            reload = [sys.executable, "-m", "transect", "reload", "--http", url]
            subprocess.run(reload, check=True, timeout=300, stdout=subprocess.DEVNULL)
            pids = [each.process.pid for each in servers]
            pids.append(httpx.get(f"{url}/health", timeout=120).json()["server_pid"])
            clients.until(3)
            clients.stopping.set()
            clients.join()
            assert clients.errors == [] and clients.servers == set(pids) and len(pids) == 3
            assert len(clients.texts) == 1
            assert servers[1].process.wait(60) == 0
        finally:
            for server in servers:
                server.stop()
            for pid in pids[2:]:
                os.kill(pid, signal.SIGTERM)
