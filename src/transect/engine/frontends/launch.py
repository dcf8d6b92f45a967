"""``launch``: an engine process of this machine, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ...checkpoints.resolve import resolve
from ...hardware.cores import undivided
from ...spec.layouts.shards import first_shard
from ...text.model_text import ModelText, load_text, text_settings
from ..config import EngineConfig
from . import wire
from .inputs import default_params
from .socket_folder import NAME, make_socket_folder


@dataclasses.dataclass(slots=True)
class Launched:
    """An engine process that loads its model, or has it."""

    process: asyncio.subprocess.Process
    socket: zmq.asyncio.Socket
    context: zmq.asyncio.Context
    text: ModelText
    path: Path
    """Directory or file of the model."""
    folder: Path

    def connected(self) -> None:
        """Delete the socket's folder once the process has connected, so that no exit of this process leaves it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    async def abandon(self) -> None:
        """Kill the process and release everything."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.context.destroy(linger=0)
        self.connected()


def own_group() -> dict[str, Any]:
    """Return the argument that gives a child process a group of its own: a terminal's Ctrl-C is the parent's business,
    also before the child can ignore it."""
    if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
        return {"process_group": 0}
    return {"start_new_session": True}  # uvloop, which Ray Serve uses, knows this one only


async def launch(config: EngineConfig, module: str) -> Launched:
    """Start an engine process, and load the text side of its model meanwhile. The process's first message is ``Ready``
    or ``Failed``.

    Args:
        module: the Python module to run.

    Raises:
        ValueError: the configuration or the model is at fault.
    """
    # The name is resolved here, once: a download shows its progress, and both processes read the same files.
    find = functools.partial(
        resolve, config.model, load_format=config.load_format, revision=config.revision, adapter=config.adapter
    )
    source = await asyncio.to_thread(find)
    first_shard(source.config, config.layout)  # before processes are started for what cannot be
    folder = make_socket_folder()
    loading = asyncio.ensure_future(asyncio.to_thread(load_text, source, **text_settings(config)))
    context = zmq.asyncio.Context()
    process = None
    try:
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        endpoint = f"ipc://{folder}/{NAME}"
        socket.bind(endpoint)
        with undivided():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, endpoint),
                stdin=asyncio.subprocess.PIPE,
                **own_group(),
            )
        assert process.stdin is not None
        text = await loading
        default_params(text.defaults)  # what is wrong with them is said now, not to the first client
        ends = text.eos_token_ids if config.eos_token_ids is None else config.eos_token_ids
        adapter = None if source.adapter is None else str(source.adapter.path)
        process_config = dataclasses.replace(
            config, model=str(source.path), revision=None, adapter=adapter, eos_token_ids=ends
        )
        settings = msgspec.msgpack.encode(dataclasses.asdict(process_config))
        process.stdin.write(len(settings).to_bytes(wire.CONFIG_LENGTH_BYTES, "little") + settings)
        return Launched(process, socket, context, text, source.path, folder)
    except BaseException:
        loading.cancel()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        context.destroy(linger=0)
        shutil.rmtree(folder, ignore_errors=True)
        raise
