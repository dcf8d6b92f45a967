"""A made-up engine for tests of the page: words as tokens, and answers that the last message chooses by its first word.

Without such a word the answer is drawn: the word at a position is a function of seed, choice, position and the word
before, as the tokens of a model are, so that an answer continues from any of its tokens.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from hashlib import blake2b
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import uvicorn

from transect.engine.frontends.async_engine import EngineDeadError
from transect.engine.scheduling.outputs import EngineOutput, RequestTimes, SchedulerStats
from transect.server.app import create_app
from transect.server.options import ServerOptions
from transect.server.process import bind, url_of
from transect.text.chat_template import ChatTemplate
from transect.text.output_processor import OutputProcessor
from transect.text.sampling_defaults import SamplingDefaults

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)
LEXICON = re.findall(
    r"\S+",
    "the a river stone light morning quiet road over under beside opens carries turns falls rises slowly again where "
    "nobody everything window letter paper ink bridge garden winter machine answers, questions. numbers dreams",
)
PIECES = re.compile(r" ?\w+|\s+|([^\w\s])\1*", re.DOTALL)
VOCAB = 60_000
END = 256
DRAWN = 24
"""Words of a drawn answer."""


class WordTokenizer:
    """Ids below 256 are bytes, 256 is the end, and the words get the following ids as they turn up, in all engines."""

    _ids: ClassVar[dict[bytes, int]] = {}
    _words: ClassVar[list[bytes]] = []

    vocab_size = VOCAB
    special_ids = frozenset({END})
    special_texts = ()
    bos_token_id = None
    eos_token_ids = (END,)
    drops_leading_space = False
    longest_token = 400

    def id_of(self, word: bytes) -> int:
        if word not in self._ids:
            self._ids[word] = END + 1 + len(self._words)
            self._words.append(word)
        return self._ids[word]

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        return [self.id_of(piece[0].encode()) for piece in PIECES.finditer(text)]

    def encode_chat(self, text: str, mask, add_special_tokens: bool = False) -> list[int]:
        return self.encode(text)

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < END:
            return bytes([token_id])
        return self._words[token_id - END - 1] if token_id > END else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


class PageEngine:
    """Answers with the text in ``scripts`` that the last message's first word names, or with drawn words."""

    max_model_len = 40_000
    vocab_size = VOCAB
    eos_token_ids = (END,)
    hidden_size = 4
    default_pooling = "last"
    pid = 1

    def __init__(self, scripts: dict[str, str] | None = None, step_s: float = 0.0) -> None:
        self.scripts, self.step_s = scripts or {}, step_s
        self.tokenizer, self.chat_template = WordTokenizer(), ChatTemplate(TEMPLATE)
        self.sampling_defaults = SamplingDefaults({"temperature": 0.7, "top_p": 0.9}, origin="made up")
        self.running: dict[str, object] = {}
        self.aborted: list[str] = []
        self.dropped: set[tuple[str, int]] = set()
        self.adapters: list[str] = []
        """Name of each request's adapter; an answer to "adapter" has it."""
        self.prompts: list[str] = []
        self.params: list[object] = []

    async def stream(
        self, prompt_token_ids, params, request_id, *, output_token_ids=None, adapter=None, **_
    ) -> AsyncIterator:
        self.adapters.append("" if adapter is None else adapter.path.name)
        text = self.tokenizer.decode(prompt_token_ids)
        self.prompts.append(text)
        self.params.append(params)
        word = (text.rpartition("[user]")[2].partition("[")[0].split() or [""])[0].lower()
        if word == "adapter":
            word = f"adapter {self.adapters[-1]}"
        self.running[request_id] = params
        processor = OutputProcessor(self.tokenizer)
        processor.add(request_id, text, prompt_token_ids, n=params.n, stop=params.stop)
        try:
            for update in processor.begin(request_id, output_token_ids) if output_token_ids else ():
                yield update
            given = [list(tokens) if tokens is not None else None for tokens in output_token_ids or ()]
            answers = given or [[] for _ in range(params.n)]
            async for update in self._updates(processor, request_id, params, prompt_token_ids, word, answers):
                yield update
        finally:
            if request_id in processor:
                self.aborted.append(request_id)
            del self.running[request_id]

    async def _updates(self, processor, request_id, params, prompt, word, answers):
        script = self.scripts.get(word)
        if word.startswith("adapter "):
            script = f"This is {word.split()[1]} speaking."
        scripts = script if isinstance(script, list) else [script] * len(answers)  # a list has one for each choice
        scripted = [None if each is None else self.tokenizer.encode(each) for each in scripts]
        steps = 0
        while request_id in processor:
            await asyncio.sleep(self.step_s)
            steps += 1
            if word == "wait" and steps == 6:
                await asyncio.sleep(3600)
            if word == "die" and steps == 6:
                raise EngineDeadError("it is gone")
            for index, tokens in enumerate(answers):
                if tokens is None:
                    continue
                if (request_id, index) in self.dropped:
                    answers[index] = None
                    for update in processor.finish(request_id, choice=index):
                        yield update
                    continue
                wanted = scripted[index % len(scripted)]
                length = DRAWN if wanted is None else len(wanted)
                if len(tokens) > length:
                    continue
                at, seed = len(tokens), params.seed or 0
                drawn = self._drawn(seed, index, at, tokens)
                token = drawn if wanted is None or tokens != wanted[:at] else wanted[at] if at < length else END
                tokens.append(token := END if at == length else token)
                ended = "stop" if token == END else "length" if len(tokens) == params.max_tokens else None
                known = EngineOutput(
                    request_id=request_id,
                    index=index,
                    new_token_ids=[token],
                    logprobs=None if params.logprobs is None else [self._position(token, seed, index, at, params)],
                    prompt_logprobs=None if params.prompt_logprobs is None or steps > 1 else self._scores(prompt),
                    finish_reason=ended,
                    times=RequestTimes(10.0, 11.0, 13.0, 17.0 if ended else None),
                )
                update = processor.process(known)
                if update is not None:
                    update.approximate = word == "continued" and at == 5
                    yield update

    def _drawn(self, seed, choice, at, tokens):
        key = f"{seed} {choice} {at} {tokens[-1] if tokens else 0}"
        number = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little")
        return self.tokenizer.id_of(("" if at == 0 else " ").encode() + LEXICON[number % len(LEXICON)].encode())

    def _position(self, token, seed, choice, at, params):
        others = [
            self.tokenizer.id_of(f" {word}".encode()) for word in LEXICON[at % 20 : at % 20 + params.logprobs - 1]
        ]
        others = [each for each in others if each != token]
        likely = -(blake2b(f"{seed} {choice} {at}".encode()).digest()[0] ** 2) / 20_000
        top = [(token, likely), *((each, -2.0 - index) for index, each in enumerate(others))]
        return SimpleNamespace(token_id=token, logprob=likely, rank=1, top=top[: params.logprobs])

    def _scores(self, prompt):
        return [
            None,
            *(SimpleNamespace(token_id=each, logprob=-1.5, rank=1, top=[(each, -1.5)]) for each in prompt[1:]),
        ]

    async def load_adapter(self, files) -> None: ...

    async def forget_adapter(self, files) -> None: ...

    async def abort(self, request_id, choice=None) -> None:
        self.dropped.add((request_id, choice))

    async def health(self):
        return SimpleNamespace(state="ok", detail=None, pids=(self.pid,))

    async def reset_prefix_cache(self) -> None: ...

    async def stats(self) -> SchedulerStats:
        zeros = {each.name: 0 for each in msgspec.structs.fields(SchedulerStats) if each.required}
        return SchedulerStats(**zeros | {"running": len(self.running), "finished": {}})


class PageServer:
    """The made-up engine behind a real socket, in a thread. ``restart`` keeps the address."""

    def __init__(self, engine: PageEngine, port: int = 0, **options) -> None:
        self.engine = engine
        self.options = ServerOptions(**{"model_names": ("made-up", "alias"), "tool_call_parser": "hermes"} | options)
        self.start(port)

    def start(self, port: int) -> None:
        sock = bind("127.0.0.1", port)
        self.url = url_of(sock)
        app = create_app(self.engine, self.options)
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]})
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            threading.Event().wait(0.002)

    @staticmethod
    def until(condition) -> None:
        """Wait until ``condition()`` is true."""
        for _ in range(20_000):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError("waited for 100 s")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()
