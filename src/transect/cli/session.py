"""An engine for the length of one command, and how fast it answered."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ..engine.config import EngineConfig
    from ..engine.frontends.async_engine import AsyncEngine
    from ..engine.scheduling.sampling_params import SamplingParams
    from ..search.judges import Judge
    from ..search.result import SearchResult
    from ..search.settings import SearchSettings
    from ..search.tree import Messages

T = TypeVar("T")


@dataclass
class AnswerSpeed:
    """Seconds from the request to its first and last token, and the number of tokens."""

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish_reason: str = ""

    @property
    def per_second(self) -> float:
        """Tokens per second after the first; 0 with fewer than two tokens."""
        return (self.tokens - 1) / (self.last_s - self.first_s) if self.last_s > self.first_s else 0.0

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.per_second:.0f} tok/s, first after {self.first_s:.2f} s"


class EngineSession:
    """Runs coroutines against one engine from plain code, which may block for input in between.

    ``with Session(config) as session: session.run(work)`` starts the engine on entry and ends it on exit, also on
    Ctrl-C at any point.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._runner = asyncio.Runner()
        self.engine: AsyncEngine

    def __enter__(self) -> Self:
        from ..engine.frontends.async_engine import AsyncEngine

        try:
            self.engine = self._runner.run(AsyncEngine.start(self._config))
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._runner.run(self.engine.shutdown())
        finally:
            self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine until it ends."""
        return self._runner.run(work)

    async def search(
        self,
        search: SearchSettings,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        messages: Messages | None = None,
        question: str = "",
        judges: Mapping[str, Judge] | None = None,
        render: Callable[[Messages], list[int]] | None = None,
        show: Callable[[dict[str, Any]], None] = lambda progress: None,
    ) -> SearchResult:
        """Search an answer (``search/``); ``show`` is called with its progress.

        Raises:
            ValueError: a setting is at fault, the engine refuses a request, or there is no answer.
        """
        from ..search.machine import SearchRun
        from ..search.streams import OverEngine, follow
        from ..search.tree import Tree

        engine, name = self.engine, uuid.uuid4().hex
        run = SearchRun(
            search, Tree(messages, question), token_ids, params, seed=secrets.randbits(63),
            max_model_len=engine.max_model_len, decode=engine.tokenizer.decode, judges=judges,
        )  # fmt: skip
        async for progress in follow(run, OverEngine(engine, name, render)):
            show(progress)
        assert run.result is not None
        return run.result

    async def stream(
        self, token_ids: Sequence[int], params: SamplingParams, show: Callable[[str], None] | None = None
    ) -> tuple[str, AnswerSpeed]:
        """Run one request with one choice; return its text, shown as it arrives, and its speed.

        Raises:
            ValueError: the engine refuses the request, or fails while running it.
        """
        begin = time.perf_counter()
        speed, pieces = AnswerSpeed(), []
        async for update in self.engine.stream(token_ids, params, uuid.uuid4().hex):
            now = time.perf_counter() - begin
            if update.token_ids:
                speed.first_s = speed.first_s or now
                speed.last_s, speed.tokens = now, speed.tokens + len(update.token_ids)
            if update.text:
                pieces.append(update.text)
                if show is not None:
                    show(update.text)
            if update.error is not None:
                raise ValueError(update.error)
            speed.finish_reason = update.finish_reason or speed.finish_reason
        return "".join(pieces), speed
