"""``AsyncEngine``: an engine in a process of its own, as an asyncio object.

The engine process takes token ids and gives token ids (process.py, wire.py); tokenizing, detokenizing and stop strings
happen here, in the caller's process, so that they never hold up a step.

A request that its caller leaves (the generator is closed, the task cancelled) is aborted in the engine. If the engine
process ends, every running stream raises ``EngineDeadError`` once, and so does every later call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import zmq

from ...checkpoints.peft_config import AdapterFiles
from ...text.model_text import ModelText
from ...text.output_processor import OutputProcessor, Update
from ...text.outputs import RequestOutput
from ..config import EngineConfig
from ..executors.pooling import Pooling, default_pooling
from ..scheduling.arrivals import check_choices
from ..scheduling.decisions import DecisionRing
from ..scheduling.outputs import EngineOutput, SchedulerStats, first_tokens_first
from ..scheduling.policies.admission import QueueFull
from ..scheduling.sampling_params import SamplingParams
from ..scheduling.snapshot import SchedulerSnapshot
from . import wire
from .client import EngineClient
from .inputs import check_params, check_token_ids, checked_submit, default_params, with_token_ids
from .launch import launch
from .questions import Questions
from .streams import EngineDeadError, EngineHealth, OutputStream, RequestOptions
from .vllm_arguments import engine_settings

STOP_WAIT_S = 5.0
"""Seconds for the process to end by itself."""
MOST_UNREAD = 4096
"""Most requests that the engine has not read yet."""
UNREAD_RETRY_S = 5.0
"""Seconds after which clients may retry if the engine does not read its messages."""


def ended_how(code: int) -> str:
    """Describe the end of a process by its exit code, which is negative after a signal."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


class AsyncEngine(EngineClient):
    """Made by ``await AsyncEngine.start(...)``; ended by ``await engine.shutdown()`` or ``async with``."""

    process_module = "transect.engine.frontends.process"
    """Module that the engine process runs."""

    def __init__(self, config: EngineConfig, text: ModelText) -> None:
        self.config = config
        self.tokenizer = text.tokenizer
        self.chat_template = text.chat_template
        self.sampling_defaults = text.defaults
        self.default_pooling: Pooling = "last"
        """Pooling of requests that do not choose one."""
        self.decisions = DecisionRing()
        """Recent decisions of the engine's scheduler."""
        self._processor = OutputProcessor(text.tokenizer)
        self._sending: set[asyncio.Future[Any]] = set()
        """Messages that wait for the engine process to start."""
        self._streams: dict[str, OutputStream] = {}
        """Requests in this engine, by id."""
        self._questions = Questions()
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._submitted = self._taken = 0
        """Number of the newest submitted request."""
        self.retired = False
        """True once another engine has taken over; this one finishes its streams."""
        self._death: str | None = None
        self.heard = time.monotonic()
        """Time of the process's last message, in seconds of the monotonic clock."""
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(cls, config: EngineConfig | None = None, **settings: Any) -> AsyncEngine:
        """Start the engine process and wait until it takes requests.

        Args:
            config: configuration; or give its fields as keyword arguments.

        Raises:
            ValueError: the configuration or the model is at fault; the message says what to change.
            EngineDeadError: the process could not start for another reason.
        """
        config = (config if config is not None else EngineConfig(**engine_settings(settings))).for_server()
        if config.replicas > 1:
            raise ValueError("one AsyncEngine is one replica: start several with engine.replicas.start_engines")
        launched = await launch(config, cls.process_module)
        try:
            engine = cls(config, launched.text)
            engine.default_pooling = default_pooling(launched.path)
            engine._attach(launched.process, launched.socket, launched.context)
            await engine._ready
        except BaseException:
            await launched.abandon()
            raise
        launched.connected()
        return engine

    def _attach(self, process: Any, socket: Any, context: Any) -> None:
        """Begin to exchange messages. The three have the methods of ``asyncio.subprocess.Process`` and of zmq's sockets
        and contexts that this class calls."""
        self._process, self._socket, self._context = process, socket, context
        self._receiver = asyncio.create_task(self._receive())
        self._receiver.add_done_callback(self._receiver_ended)
        self._watcher = asyncio.create_task(self._watch())

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def info(self) -> wire.Ready:
        """Report of the engine when it became ready: context length, KV capacity, kernels."""
        return self._ready.result()

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.info.max_model_len

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""
        return self.info.vocab_size

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state, and of an embedding."""
        return self.info.hidden_size

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return self.info.eos_token_ids

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def served(self) -> bool:
        """True once the process has read a request."""
        return self._taken > 0

    @property
    def death(self) -> str | None:
        """Reason for the engine's end; None while it is alive."""
        return self._death

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's files recommend; see ``EngineConfig.generation_config``."""
        return default_params(self.sampling_defaults)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def snapshot(self, request_id: str) -> RequestOutput | None:
        """Return the current state of a request; see ``EngineClient``."""
        return self._processor.snapshot(request_id) if request_id in self._processor else None

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Update, None]:
        """Yield deltas of all choices until each has had its terminal update. Raises as ``generate`` does.

        A caller that falls behind gets what came meanwhile of a choice in one delta. Clients share the engine by their
        weights.
        """
        stream = self.open(prompt_token_ids, params, request_id, **options)
        async with contextlib.aclosing(self.follow(stream)) as updates:
            async for update in updates:
                yield update

    def open(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, **options: Any
    ) -> OutputStream:
        """Check a request, and build its stream for ``follow``. Raises as ``generate`` does."""
        self._check_alive()
        given = RequestOptions(**options)
        ids = checked_submit(request_id, prompt_token_ids, given.priority)
        params = with_token_ids(check_params(params), self.tokenizer)
        check_token_ids(ids, params, self.vocab_size, self.info.eos_token_ids)
        check_choices(params.n, self.info.max_num_seqs)
        if given.adapter is not None and not self.config.enable_lora:
            raise ValueError("this engine serves no adapters: start it with enable_lora")
        return OutputStream(request_id, ids, params, given)

    async def follow(self, stream: OutputStream) -> AsyncGenerator[Update, None]:
        """Run a request here: a new one, or one that another engine has left unfinished. If this engine ends too,
        ``stream`` can be continued elsewhere. Raises as ``generate`` does."""
        self._check_alive()
        if not stream.begun:
            self._check_room()
        name = stream.request_id
        begun = stream.enter(self._processor)
        self._submitted += 1
        stream.number = self._submitted
        self._streams[name] = stream
        self._idle.clear()
        try:
            for update in begun:
                stream.left -= update.finished
                yield update
            if stream.left:
                await self._send(stream.submit())
            while stream.left:
                news = await stream.take()
                while news:
                    item = news.pop(0)
                    if isinstance(item, Exception):
                        for each in news:  # what ended the request after that
                            stream.mailbox.put(each)
                        raise item
                    stream.left -= item.finished
                    yield item
        finally:
            stream.state = self._processor.release(name)
            if stream.state is not None and self._death is None:
                self._send_soon(wire.Abort(name))
            del self._streams[name]
            if not self._streams:
                self._idle.set()

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it; see ``EngineClient``."""
        if request_id not in self._streams:
            return
        for update in self._processor.finish(request_id, choice=choice):
            self._streams[request_id].mailbox.put(update)
        if self._death is None:
            await self._send(wire.Abort(request_id, choice))

    def end(self, stream: OutputStream, choice: int | None = None) -> list[Update]:
        """End a request that is in no engine, or one choice of it. Returns the terminal updates of what this ends."""
        stream.enter(self._processor)
        updates = self._processor.finish(stream.request_id, choice=choice)
        stream.state = self._processor.release(stream.request_id)
        return updates

    # ---- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Report at once whether the engine lives and makes progress."""
        if self._death is not None:
            return EngineHealth("dead", self._death)
        silent = time.monotonic() - self.heard
        if silent > self.config.silence_s:
            return EngineHealth("hung", f"no sign of life from the engine for {silent:.0f} s", (self.pid,))
        return EngineHealth("ok", "the engine makes progress", (self.pid,))

    async def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and counters, read between two steps."""
        answer: SchedulerStats = await self._ask(wire.StatsQuery())
        return answer

    async def look(self, requests: bool = False) -> SchedulerSnapshot:
        """Return a snapshot of the scheduler between two steps; ``requests``: with all unfinished requests. All records
        of the decision log up to then are in ``decisions``."""
        answer: SchedulerSnapshot = await self._ask(wire.Look(requests))
        return answer

    async def _ask(self, question: wire.ToEngine) -> Any:
        self._check_alive()
        waiter = self._questions.ask()
        await self._send(question)
        return await waiter

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests keep their KV.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        await self._send(wire.ResetPrefixCache())
        await self.stats()  # messages are taken in order: it has been done

    async def load_adapter(self, files: AdapterFiles) -> None:
        """Have the engine read an adapter in a thread, check it and keep it in host memory.

        Raises:
            ValueError: the adapter cannot be served; the message says why.
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        waiter = self._questions.ask(files.id)
        await self._send(wire.LoadAdapter(files.id, str(files.path)))
        if error := await waiter:
            raise ValueError(error)

    async def forget_adapter(self, files: AdapterFiles) -> None:
        """Let the engine forget an adapter that no request has."""
        if self._death is None:
            await self._send(wire.ForgetAdapter(files.id))

    async def drain(self) -> None:
        """Wait until no request is running. New ones are still accepted: refusing them is the caller's business."""
        await self._idle.wait()

    def kill(self, reason: str) -> None:
        """Kill the engine process, even if it is busy. Streams that still run raise ``EngineDeadError``."""
        self._die(reason)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def shutdown(self) -> None:
        """End the engine process. Streams that still run raise ``EngineDeadError``. May be called repeatedly."""
        self._die("it was shut down")
        if self._process.returncode is None:
            self._send_soon(wire.Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), STOP_WAIT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        await self._process.wait()
        for task in (self._receiver, self._watcher):
            task.cancel()
        await asyncio.gather(self._receiver, self._watcher, return_exceptions=True)
        self._context.destroy(linger=0)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    # ---- the other process -------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _check_room(self) -> None:
        """Refuse a request if too many are unread. The engine bounds its queue; this bounds the messages in the
        socket."""
        unread, most = self._submitted - self._taken, self.config.max_queue
        if unread >= (MOST_UNREAD if most is None else most + self.info.max_num_seqs):
            raise QueueFull(unread, UNREAD_RETRY_S, f"the engine has not read {unread} requests yet")

    async def _send(self, message: wire.ToEngine) -> None:
        sending = asyncio.ensure_future(self._socket.send(wire.encode(message)))
        self._sending.add(sending)
        try:
            await sending
        except (asyncio.CancelledError, zmq.ZMQError):  # the engine is gone, or the caller is cancelled
            if self._death is None or ((task := asyncio.current_task()) is not None and task.cancelling()):
                raise
            raise EngineDeadError(self._death) from None
        finally:
            self._sending.discard(sending)

    def _send_soon(self, message: wire.ToEngine) -> None:
        """Send without waiting: without a high-water mark the message is queued at once, even during cancellation."""
        # By the socket that receives too: a send of another one may take the signal that something has come.
        with contextlib.suppress(zmq.ZMQError):
            sent = asyncio.ensure_future(self._socket.send(wire.encode(message), zmq.NOBLOCK))
            sent.add_done_callback(lambda each: each.cancelled() or each.exception())  # the engine is gone

    async def _receive(self) -> None:
        while True:
            message = wire.decode_from_engine(await self._socket.recv())
            self.heard = time.monotonic()
            match message:
                case wire.Outputs():
                    if message.decisions:
                        self.decisions.put(message.decisions)
                    for output in first_tokens_first(message.outputs):
                        self._take(output)
                case wire.Refused():
                    self._refuse(message)
                case wire.Taken():
                    self._taken = message.number
                case wire.Stats() | wire.Looked():
                    self._questions.answer(message.stats if isinstance(message, wire.Stats) else message.snapshot)
                case wire.AdapterLoaded():
                    self._questions.answer_all(message.error, message.id)
                case wire.Ready():
                    self._ready.set_result(message)
                case wire.Failed():
                    if not self._ready.done():
                        kind = ValueError if message.user_error else EngineDeadError
                        self._ready.set_exception(kind(message.message))
                    self._die(message.message)

    def _receiver_ended(self, receiver: asyncio.Task[None]) -> None:
        """End the engine after its receiver has failed, so that streams end with an error instead of waiting for
        ever."""
        if not receiver.cancelled() and receiver.exception() is not None:
            self._die(f"its messages could not be read: {receiver.exception()!r}")

    def _waiter(self, request_id: str) -> OutputStream | None:
        """Return the stream that waits for the engine's messages about a request; None if a message is about an earlier
        request of the same name, because the engine had not read this one yet."""
        stream = self._streams.get(request_id)
        return stream if stream is not None and stream.number <= self._taken else None

    def _take(self, output: EngineOutput) -> None:
        """Turn an output into text. If that fails, only this request ends."""
        stream = self._waiter(output.request_id)
        if stream is None or output.finish_reason == "abort":  # the answer to an abort: what it ended has ended here
            return
        try:
            update = self._processor.process(output)
        except Exception as error:
            stream.mailbox.put(error)
            return
        for request_id, choice in update.aborts if update is not None else ():
            self._send_soon(wire.Abort(request_id, choice))
        if update is not None and (update.token_ids or update.text or update.finished):
            stream.mailbox.put(update)

    def _refuse(self, message: wire.Refused) -> None:
        stream = self._waiter(message.request_id)
        if stream is not None:
            self._processor.release(message.request_id)
            reason, full = message.message, message.queue_full
            stream.mailbox.put(ValueError(reason) if full is None else QueueFull(full[0], full[1], reason, full[2]))

    async def _watch(self) -> None:
        code = await self._process.wait()
        await asyncio.sleep(0.05)  # its last words may still be under way
        reason = self._end_of(code)
        self._die(reason)
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(f"{reason} while starting"))

    def _end_of(self, code: int) -> str:
        """Return the reason for the engine's end, from the exit code of its process."""
        return f"the engine process {ended_how(code)}"

    def _die(self, reason: str) -> None:
        """Report the engine's end to every stream and every waiter once; the first reason is kept."""
        if self._death is not None:
            return
        self._death = reason
        for stream in self._streams.values():
            stream.mailbox.put(EngineDeadError(reason))
        self._questions.fail(EngineDeadError(reason))
        for sending in list(self._sending):
            sending.cancel()
