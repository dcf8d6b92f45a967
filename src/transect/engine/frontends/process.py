"""The engine process: loads the model, then turns messages into steps until the parent stops it.

Started by ``AsyncEngine`` as ``python -m transect.engine.frontends.process ENDPOINT`` with the configuration as
msgpack on its standard input. That pipe stays open for as long as the parent lives; when it closes, this process
ends, so that a killed server leaves no engine behind. Ctrl-C in a terminal reaches every process of its group; it is
ignored here, because the parent decides when to stop.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ...checkpoints.peft_config import AdapterFiles
from ...hardware.cores import leave_core
from ...parallel.children import starting
from ...parallel.gathering import under_torchrun
from ...text.grammar.checker import Busy
from ..config import EngineConfig
from ..executors.gpu.compilers import compiling
from ..executors.gpu.options import GPUOptions
from ..scheduling.core import EngineCore
from ..scheduling.outputs import EngineOutput
from ..scheduling.policies.admission import QueueFull
from ..scheduling.request import Request
from ..scheduling.sampling_params import SamplingParams
from ..scheduling.snapshot import snapshot
from . import wire
from .adapter_queue import AdapterQueue
from .collector import keep_from_collector
from .grammar_queue import GrammarQueue

if TYPE_CHECKING:
    from ..build import BuiltEngine

JOB = "transect.engine.ranks"
"""Module of the other ranks' job."""
STUCK_S = 3.0
"""Seconds for the loop to notice that a rank has ended."""
BUSY_RETRY_S = 5.0
"""Seconds after which clients may retry if the compiler of grammars is busy."""
SWITCH_S = 5e-4
"""Seconds after which a thread that prepares a grammar yields to the loop of steps. Python's default is 5 ms, for which
a step on a CPU would wait each time that it returns from the kernels."""
GRAMMAR_POLL_MS = 5
"""Milliseconds between checks for compiled grammars while nothing runs."""


def main() -> None:
    """Run the engine process; exit with 0 after ``Shutdown``, with 1 when the engine cannot start or has failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the server's business, as in ``parallel/rank.py``
    length = int.from_bytes(sys.stdin.buffer.read(wire.CONFIG_LENGTH_BYTES), "little")
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(length))
    threading.Thread(target=_exit_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(sys.argv[1])
    code = _run(socket, settings)
    socket.close(linger=2000)
    context.term()
    sys.exit(code)


def _run(socket: zmq.Socket[bytes], settings: dict[str, Any]) -> int:
    started, began = time.monotonic(), time.perf_counter()
    try:
        config = EngineConfig(**settings | {"gpu": GPUOptions(**settings["gpu"])})
        alone, left = 1 if under_torchrun() else config.ranks, list[int]()
        with compiling(config) as compilers, starting(alone, JOB) as children:
            gc.disable()  # what is imported stays; searching it for garbage takes a tenth of a start
            from ..device import device_for
            from ..ranks import end, start_engine  # imports torch, which takes seconds, as the children do meanwhile

            gc.enable()
            if config.ranks == 1 and device_for(config)[0].type == "cpu":
                left = leave_core(config.cpu_threads())
                sys.setswitchinterval(SWITCH_S)
            built = start_engine(config, compilers, began, children=children)
    except (ValueError, OSError) as error:
        socket.send(wire.encode(wire.Failed(str(error), user_error=True)))
        return 1
    except Exception as error:
        traceback.print_exc()
        socket.send(wire.encode(wire.Failed(f"{type(error).__name__}: {error}", user_error=False)))
        return 1
    keep_from_collector()
    for line in built.report:
        print(f"transect: {line}", file=sys.stderr)
    ready = _ready(built, time.monotonic() - started, left)
    socket.send(wire.encode(ready))
    loop = _Loop(socket, built, ready)
    if built.ranks is not None:
        built.ranks.tell(loop.end_if_stuck)
    try:
        loop.run()
    except Exception as error:
        if type(error).__name__ == "RankFailure":
            loop.fail(f"the engine has lost a rank: {error}")
        else:
            traceback.print_exc()
            loop.fail(f"a step failed: {type(error).__name__}: {error}")
        return 1
    finally:
        end(built.core, built.ranks)
    return 0


def _ready(built: BuiltEngine, seconds: float, cores_left: list[int]) -> wire.Ready:
    return wire.Ready(
        max_model_len=built.max_model_len,
        max_num_seqs=built.core.scheduler.config.max_num_seqs,
        eos_token_ids=list(built.eos_token_ids),
        vocab_size=built.vocab_size,
        hidden_size=built.source.config.dim,
        kv_tokens=built.kv_tokens,
        kernels=built.kernels,
        load_seconds=seconds,
        numerics=built.numerics,
        cores_left=cores_left,
    )


MOST_DECISIONS = 64
"""Records of the decision log that wait for the next output, before they are sent without one."""


class _Loop:
    """The loop of messages and steps. Between two steps every waiting message is taken; without work the loop
    sleeps."""

    def __init__(self, socket: zmq.Socket[bytes], built: BuiltEngine, ready: wire.Ready) -> None:
        self._socket, self._ready = socket, ready
        self._core: EngineCore = built.core
        self._compiler = built.grammars(checked=True)
        self._grammars = GrammarQueue(self._core, self._compiler)
        self._adapters = AdapterQueue(built.adapters, self._grammars.add)
        if built.adapters is not None:
            running = built.adapters.in_use
            built.adapters.in_use = lambda: {*running(), *self._grammars.adapters}
        self._eos = built.eos_token_ids
        self._ranks = built.ranks
        self._stopping = False
        self._sending = threading.Lock()
        self._failed = False
        self._last_sent = 0.0
        self._read = self._told = 0
        """Number of the newest submit that was read, and as told to the caller."""
        self._decided: list[bytes] = []
        """Records of the decision log that have not been sent to the other process."""
        if self._core.decisions is not None:
            self._decided.append(self._core.decisions.header)
            self._core.decisions.sink = self._decided.append
            self._send_decided([])

    def run(self) -> None:
        while not self._stopping:
            if self._ranks is not None:
                self._ranks.check()
            patience = GRAMMAR_POLL_MS if self._grammars or self._adapters else int(wire.HEARTBEAT_S * 1000)
            if self._core.has_work:
                self._wait_to_plan()
            if self._core.has_work or self._socket.poll(patience):
                self._take_messages()
            refused = self._adapters.admit() if self._adapters else []
            refused += self._grammars.admit() if self._grammars else []
            for request_id, error in refused:
                self._refuse(request_id, error)
            while self._adapters.loaded:
                self._send(wire.AdapterLoaded(*self._adapters.loaded.pop(0)))
            if self._core.has_work and not self._stopping:
                outputs = self._core.step()
                if outputs or len(self._decided) > MOST_DECISIONS:
                    self._send_decided(outputs)
            if time.monotonic() - self._last_sent >= wire.HEARTBEAT_S:
                self._send(wire.Alive())
        self._compiler.close()
        self._adapters.close()
        if self._core.decisions is not None:
            self._core.decisions.close()

    def _wait_to_plan(self) -> None:
        """Take requests while the device works: they become part of the step that is planned next."""
        while (seconds := self._core.time_to_plan()) > 0 and not self._stopping:
            if self._socket.poll(int(seconds * 1e3)):
                self._take_messages()

    def _take_messages(self) -> None:
        try:
            self._take_waiting()
        finally:
            self._tell_taken()

    def _tell_taken(self) -> None:
        if self._told != self._read:
            self._told = self._read
            self._send(wire.Taken(self._read))

    def _take_waiting(self) -> None:
        while True:
            try:
                message = wire.decode_to_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case wire.Submit():
                    self._submit(message)
                case wire.Abort():
                    if not self._adapters.abort(message.request_id, message.choice):
                        self._grammars.abort(message.request_id, message.choice)
                case wire.StatsQuery():
                    stats = self._core.stats()
                    stats.grammar_cache_bytes = self._compiler.kept_bytes
                    self._send(wire.Stats(stats))
                case wire.Look():
                    self._send_decided([])
                    seen = snapshot(self._core.scheduler, message.requests)
                    seen.elsewhere = len(self._grammars) + len(self._adapters.waiting)
                    self._send(wire.Looked(seen))
                case wire.ResetPrefixCache():
                    self._core.reset_prefix_cache()
                case wire.LoadAdapter():
                    self._adapters.load(AdapterFiles(Path(message.path), message.id))
                case wire.ForgetAdapter():
                    self._adapters.forget(message.id)
                case wire.NewCaller():
                    self._change_caller()
                case wire.Shutdown():
                    self._stopping = True

    def _send_decided(self, outputs: list[EngineOutput]) -> None:
        """Send outputs with the records of the decision log so far."""
        self._send(wire.Outputs(outputs, b"".join(self._decided)))
        self._decided.clear()

    def _change_caller(self) -> None:
        for name in (*self._adapters.waiting, *self._grammars.waiting, *self._core.scheduler.requests):
            if not self._adapters.abort(name, None):
                self._grammars.abort(name)
        self._read = self._told = 0
        self._decided.clear()
        if self._core.decisions is not None:
            self._decided.append(self._core.decisions.header)
        self._send(self._ready)
        if self._decided:
            self._send_decided([])

    def _submit(self, message: wire.Submit) -> None:
        self._read = message.number
        try:
            request = Request(
                message.request_id,
                tuple(message.prompt_token_ids),
                SamplingParams(**message.params),
                priority=message.priority,
                arrival_time=message.arrival,
                eos_token_ids=self._eos,
                pooling=message.pooling,
                client=message.client,
                weight=message.weight,
                output_token_ids=message.output_token_ids,
                adapter=message.adapter,
                given=message.given,
            )
            if message.adapter:
                self._adapters.add(request, AdapterFiles(Path(message.adapter_path), message.adapter))
            else:
                self._grammars.add(request)
        except (QueueFull, ValueError) as error:
            self._tell_taken()
            self._refuse(message.request_id, error)

    def _refuse(self, request_id: str, error: Exception) -> None:
        full = (error.waiting, error.retry_after, error.own) if isinstance(error, QueueFull) else None
        if isinstance(error, Busy):
            full = len(self._grammars), BUSY_RETRY_S, False
        if full is None and not isinstance(error, ValueError):
            traceback.print_exception(error)
        message = error.reason if isinstance(error, QueueFull) else str(error)
        self._send(wire.Refused(request_id, message, full))

    def _send(self, message: wire.FromEngine) -> None:
        with self._sending:
            if not self._failed:
                self._socket.send(wire.encode(message))
                self._last_sent = time.monotonic()

    def fail(self, reason: str) -> None:
        """Send the last message: the engine has failed."""
        self._send(wire.Failed(reason, user_error=False))
        self._failed = True

    def end_if_stuck(self, reason: str) -> None:
        """End the process after a rank has ended, if the loop does not end by itself: a step that waits for a device
        may then never return. Called in another thread."""
        time.sleep(STUCK_S)
        self.fail(f"the engine has lost a rank: {reason}")
        self._socket.close(linger=1000)
        time.sleep(1.0)
        os._exit(1)


def _exit_with_parent(pipe: int) -> None:
    """Wait until the parent's end of the pipe closes, then end the process at once.

    Reads the file descriptor itself: a buffered reader would hold a lock that the interpreter wants at its own end.
    """
    while os.read(pipe, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
