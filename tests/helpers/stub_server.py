"""``transect serve`` with engines without a model (``stub_engine``): the shipping server in a process of its own.

``StubServer`` starts ``python -m stub_server serve MODEL ...``. The model's directory gives the tokenizer alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

HERE = Path(__file__).parent
PATIENCE_S = 120
PAUSE_S = 0.03
"""Seconds between two requests of a client of ``Load``."""
PASS_ON = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="http")
os.execv(sys.argv[2], sys.argv[2:])"""
"""Program that becomes the server, with a socket as the first descriptor."""


class StubServer:
    """A server process.

    Args:
        model: directory with a tokenizer (``tiny_llm``).
        options: of ``transect serve``.
        step_s: time of a step in seconds.
        blocks, seqs: KV blocks and places of each engine.
        program: ``transect`` runs real engines, with the model.
        listening: socket that is passed to the server as systemd would.
    """

    def __init__(
        self,
        model,
        *options: str,
        step_s: float = 0.01,
        port: int = 0,
        blocks: int = 4096,
        seqs: int = 64,
        program: str = "stub_server",
        listening: socket.socket | None = None,
    ) -> None:
        paths = [str(HERE), str(HERE.parents[1] / "src")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "STUB_STEP_S": str(step_s)}
        environment |= {"STUB_BLOCKS": str(blocks), "STUB_SEQS": str(seqs)}
        if program == "transect":
            environment.pop("OMP_NUM_THREADS", None)
        words = ["serve", str(model), "--port", str(port), "--served-model-name", "m", *options]
        command, passed = [sys.executable, "-m", program, *words], ()
        if listening is not None:
            command, passed = [sys.executable, "-c", PASS_ON, str(listening.fileno()), *command], (listening.fileno(),)
        self.process = subprocess.Popen(
            command,
            pass_fds=passed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        ready = self.process.stdout.readline()
        if " ready on " not in ready:
            self.stop()
            raise AssertionError(f"no ready line: {ready!r} {self.process.stderr.read()}")
        self.url = ready.split(" ready on ")[1].split()[0]
        self.port = int(self.url.rsplit(":", 1)[1])

    def complete(self, prompt: str = "Hello there", key: str | None = None, **body) -> httpx.Response:
        """Ask for a completion."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        given = {"model": "m", "prompt": prompt, "max_tokens": 50, "ignore_eos": True} | body
        return httpx.post(f"{self.url}/v1/completions", json=given, headers=headers, timeout=PATIENCE_S)

    def stop(self) -> None:
        """End it in good order if it will, else by force."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Load:
    """Clients that ask one request after another, until the context ends.

    Args:
        server: to ask.
        streams: requests at the same time.
        key: their API key.
        tail: most characters of a prompt after the beginning that all of them have.
    """

    def __init__(self, server: StubServer, streams: int, key: str | None = None, tail: int = 60, **body) -> None:
        self._server, self._streams, self._key, self._tail, self._body = server, streams, key, tail, body
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(streams)

    def __enter__(self) -> Load:
        self._running = [self._pool.submit(self._ask, number) for number in range(self._streams)]
        return self

    def _ask(self, number: int) -> None:
        shared = "A beginning that all of the prompts have. " * 3
        turn = 0
        while not self._over.is_set():
            turn += 1
            own = (f"{number} {turn} " * self._tail)[: (31 * number + 97 * turn) % self._tail + 8]
            try:
                self._server.complete(shared + own, self._key, **self._body)
            except httpx.HTTPError:  # the server was ended, as the test wants it
                self._over.wait(0.1)
            self._over.wait(PAUSE_S)

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._pool.shutdown()


if __name__ == "__main__":
    from transect.cli import main
    from transect.engine.frontends.async_engine import AsyncEngine

    AsyncEngine.process_module = "stub_engine"
    main()
