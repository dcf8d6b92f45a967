"""A fake engine for the HTTP layer: scripted tokens, the real OutputProcessor, one token for each byte of text."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn

from transect.engine.frontends.async_engine import EngineDeadError
from transect.engine.scheduling.outputs import EngineOutput, RequestTimes, SchedulerStats
from transect.engine.scheduling.policies.admission import QueueFull
from transect.server.app import create_app
from transect.server.options import ServerOptions
from transect.server.process import bind, url_of
from transect.text.chat_template import ChatTemplate
from transect.text.output_processor import OutputProcessor
from transect.text.sampling_defaults import SamplingDefaults

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


class ByteTokenizer:
    """Token 0..255: that byte. 256: end."""

    vocab_size = 257
    special_ids = frozenset({256})
    special_texts = ()
    bos_token_id = None
    eos_token_ids = (256,)
    drops_leading_space = False
    longest_token = 1

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_chat(self, text: str, mask, add_special_tokens: bool = False) -> list[int]:
        return self.encode(text)

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(each) for each in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def position(token: int, choice: int = 0):
    """A token's logprobs; the third choice is the likeliest."""
    likely = -0.25 if choice == 2 else -0.5
    return SimpleNamespace(token_id=token, logprob=likely, rank=1, top=[(token, -0.5), (65, float("-inf"))])


def vector_of(token_ids, pooling):
    """A made-up pooled vector."""
    return np.array([len(token_ids), token_ids[-1], 3.0, -1.0 if pooling == "mean" else 1.0])


@dataclass
class FakeEngine:
    """Answers every prompt with ``reply``; the prompt's last word can ask for trouble."""

    reply: str = "Hello, wörld. END of it"
    max_model_len: int = 200
    vocab_size: int = 257
    eos_token_ids: tuple[int, ...] = (256,)
    hidden_size: int = 4
    default_pooling: str = "last"
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    chat_template: ChatTemplate | None = field(default_factory=lambda: ChatTemplate(TEMPLATE))
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    pid: int = 4242
    resets: int = 0
    state: str = "ok"
    running: dict[str, object] = field(default_factory=dict)
    seen: list = field(default_factory=list)
    clients: list = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    script: Callable[[str, int, int], str] | None = None
    """(prompt, choice, seed) -> reply, which is then complete."""
    dropped: list[tuple[str, int]] = field(default_factory=list)
    processors: dict[str, OutputProcessor] = field(default_factory=dict)
    ended: list = field(default_factory=list)

    async def abort(self, request_id, choice=None) -> None:
        self.dropped.append((request_id, choice))
        if request_id in self.processors:
            self.ended += self.processors[request_id].finish(request_id, choice=choice)

    async def stream(
        self,
        prompt_token_ids,
        params,
        request_id,
        *,
        prompt=None,
        priority=0,
        pooling=None,
        client="",
        weight=1.0,
        adapter=None,
        output_token_ids=None,
        session="",
    ) -> AsyncIterator:
        text = bytes(each for each in prompt_token_ids if each < 256).decode(errors="replace")
        if "FULL" in text:
            raise QueueFull(7, 3.0)
        if "OWN LIMIT" in text:
            raise QueueFull(7, 3.0, "this client has enough", own=True)
        if "REFUSE" in text:
            raise ValueError("max_tokens is not what this engine likes: use less")
        self.seen.append((request_id, params, priority))
        self.clients.append((client, weight))
        pooled = None if pooling is None else vector_of(prompt_token_ids, pooling).tobytes()
        self.running[request_id] = params
        processor = OutputProcessor(self.tokenizer)
        include = params.include_stop_str_in_output
        processor.add(request_id, prompt, prompt_token_ids, n=params.n, stop=params.stop, include_stop=include)
        self.processors[request_id] = processor
        try:
            for update in processor.begin(request_id, output_token_ids) if output_token_ids else ():
                yield update
            start = len((output_token_ids or [()])[-1])
            async for update in self._updates(processor, request_id, params, prompt_token_ids, text, pooled, start):
                yield update
        finally:
            if request_id in processor:
                self.aborted.append(request_id)
            del self.running[request_id], self.processors[request_id]

    async def _updates(self, processor, request_id, params, prompt_token_ids, text, pooled, start=0):
        prompt_logprobs = None
        script = self.script or (lambda text, choice, seed: self.reply)
        replies = [list(script(text, index, params.seed).encode()) for index in range(params.n)]
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(position(each) for each in prompt_token_ids[1:])]
        limits = [min(len(tokens), params.max_tokens or len(tokens)) for tokens in replies]
        for step in range(start, max(limits)):
            await asyncio.sleep(0)
            if step == 3 and "HANG" in text:
                await self.go.wait()
            if step == 3 and "DIE" in text:
                raise EngineDeadError("it is gone")
            for index, tokens in enumerate(replies):
                if step >= limits[index]:
                    continue
                last = step == limits[index] - 1
                complete = self.script is not None and last and limits[index] == len(tokens)
                failed = step == 3 and "NAN" in text
                update = processor.process(
                    EngineOutput(
                        request_id=request_id,
                        index=index,
                        new_token_ids=[] if failed else [tokens[step]],
                        logprobs=None if params.logprobs is None or failed else [position(tokens[step], index)],
                        prompt_logprobs=prompt_logprobs if step == start and index == 0 else None,
                        finish_reason="error" if failed else "stop" if complete else "length" if last else None,
                        complete=complete,
                        error="the logits are not finite" if failed else None,
                        pooled=pooled if step == 0 and index == 0 else None,
                        num_cached_tokens=1,
                        times=RequestTimes(10.0, 11.0, 13.0, 17.0 if last else None),
                    )
                )
                if update is not None:
                    yield update
            while self.ended and self.ended[0].request_id == request_id:
                yield self.ended.pop(0)
            if request_id not in processor:
                return

    async def health(self):
        return SimpleNamespace(state=self.state, detail=None, pids=(self.pid,))

    async def reset_prefix_cache(self) -> None:
        if self.state == "dead":
            raise EngineDeadError("it is gone")
        self.resets += 1

    async def stats(self) -> SchedulerStats:
        if self.state != "ok":
            await asyncio.sleep(3600)
        return SchedulerStats(
            waiting=1,
            preempted=0,
            running=len(self.running),
            kv_blocks_total=10,
            kv_blocks_used=5,
            kv_blocks_cached=2,
            prefix_query_tokens=8,
            prefix_hit_tokens=2,
            preemptions=3,
            jumped_tokens=0,
            prompt_tokens=0,
            generation_tokens=0,
            steps=9,
            timed_steps=8,
            step_seconds=0.5,
            drafted_tokens=9,
            accepted_at={"0": 4, "1": 2},
            predicted_step_seconds=0.6,
            finished={},
        )


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def shared_engine() -> FakeEngine:
    """One for all tests of a file, which leave it as it is."""
    return FakeEngine()


@pytest.fixture
def options() -> ServerOptions:
    return ServerOptions(model_names=("fake-model", "alias"), max_body_bytes=20_000)


@pytest.fixture
def app(engine: FakeEngine, options: ServerOptions):
    return create_app(engine, options)


@pytest.fixture
def client(app) -> Iterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@contextmanager
def running(app) -> Iterator[str]:
    """An app behind a real socket: the server's address."""
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, http="h11", loop="asyncio"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.002)
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def live(app) -> Iterator[str]:
    """The fake engine behind a real socket, for clients that bring their own HTTP: the server's address."""
    with running(app) as address:
        yield address
