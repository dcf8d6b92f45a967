"""The server's own life around a fake engine: real sockets, in this process."""

import asyncio
import os
import signal

import pytest

from transect.server.options import ServerOptions
from transect.server.process import bind, serve


@pytest.fixture
def serving(engine):
    """``serving(during, **options)``: serve on a free port while ``during(port)`` runs, then end as a signal would."""

    async def run(during, grace_s=5.0, reload=None, host="127.0.0.1", **options):
        async def start():
            return engine

        async def shutdown():
            engine.state = "dead"
            engine.go.set()

        async def conduct():
            try:
                await asyncio.wait_for(during(sock.getsockname()[1]), 200)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        engine.shutdown = shutdown
        sock = bind(host, 0)
        options = ServerOptions(model_names=("m",), grace_s=grace_s, **options)
        tasks = []

        def ready(_):
            tasks.append(asyncio.ensure_future(conduct()))

        code = await serve(start, options, sock, ready=ready, reload=reload)
        await asyncio.gather(*tasks)
        return code

    return run
