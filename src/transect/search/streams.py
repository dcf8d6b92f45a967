"""Run a search over streams of updates: one task for each engine request, and one consumer. For servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from ..checkpoints.peft_config import AdapterFiles
from ..engine.frontends.mailbox import Mailbox
from ..text.output_processor import Update
from .machine import Call, EndChoice, Operation, Render, RunRequest, SearchRun
from .prices import BranchPrice
from .result import TreeNews
from .tree import Messages

QUOTE_S = 0.1
"""Age in seconds from which the price of a branch is asked for again."""
PROGRESS_S = 0.25
"""Least seconds between two reports in which only numbers of tokens have changed."""


class Performs(Protocol):
    """Performs the operations of a search in an engine."""

    def submit(self, operation: RunRequest) -> AsyncIterator[Update]:
        """Yield the updates of an engine request; closing the iterator ends it."""

    async def abort(self, key: int, choice: int) -> None:
        """End a choice of an engine request, whose terminal update may still come."""

    async def render(self, messages: Messages) -> list[int] | None:
        """Return the token ids of a conversation; None if they do not fit into the context."""

    async def call(self, operation: Call) -> float | None:
        """Return the score of a judge's function."""

    async def price(self) -> BranchPrice | None:
        """Return the cost of a branch now; None if it is not known."""


async def follow(run: SearchRun, engine: Performs) -> AsyncGenerator[dict[str, Any], None]:
    """Run a search to its end, and yield its progress; afterwards ``run.result`` is set.

    With ``details`` in its settings, progress names the branches that have changed.

    Closing the generator ends all engine requests. Errors of the engine are raised here.

    Raises:
        ValueError: the search has no answer.
    """
    loop = asyncio.get_running_loop()
    mailbox: Mailbox[Callable[[], None] | Exception] = Mailbox()
    tasks: set[asyncio.Task[None]] = set()
    seconds = run.search.budget.seconds
    began = quoted = loop.time()
    end = None if seconds is None else began + seconds
    version, shown = -1, 0.0
    tree_news = TreeNews()

    def start(work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                mailbox.put(error)

        task = asyncio.create_task(guarded())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    try:
        while True:
            for operation in run.take():
                if not run.done:
                    start(_perform(run, engine, operation, mailbox))
            now = loop.time()
            if run.version != version or now - shown >= PROGRESS_S or run.done:
                version, shown = run.version, now
                more = {"branches": tree_news.take(run.tree, run.running)} if run.search.details else {}
                yield run.progress() | more
            if run.done:
                return
            if end is not None and now >= end:
                run.end()
                continue
            try:
                async with asyncio.timeout(None if end is None else end - now):
                    news = await mailbox.take()
            except TimeoutError:
                continue
            if end is not None:
                run.costs.spent_s = loop.time() - began
                if run.costs.price is None or loop.time() - quoted >= QUOTE_S:
                    run.costs.price, quoted = await engine.price(), loop.time()
            for each in news:
                if isinstance(each, Exception):
                    raise each
                each()
    finally:
        pending = list(tasks)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _perform(
    run: SearchRun, engine: Performs, operation: Operation, mailbox: Mailbox[Callable[[], None] | Exception]
) -> None:
    """Perform one operation, and put what it brings into the mailbox."""
    if isinstance(operation, RunRequest):
        key = operation.key
        async with aclosing(engine.submit(operation)) as updates:  # type: ignore[type-var]
            async for update in updates:
                mailbox.put(lambda update=update: run.feed(key, update))  # type: ignore[misc]
    elif isinstance(operation, EndChoice):
        await engine.abort(operation.key, operation.choice)
    elif isinstance(operation, Render):
        ids = await engine.render(operation.messages)
        mailbox.put(lambda: run.rendered(operation.key, ids))
    else:
        score = await engine.call(operation)
        mailbox.put(lambda: run.judged(operation.key, score))


class OverEngine:
    """Performs the operations of one search in an ``AsyncEngine`` or ``Replicas``.

    Args:
        engine: streams updates.
        name: beginning of the engine requests' ids.
        render: token ids of a conversation.
        adapters: files of adapters by name.
    """

    def __init__(
        self,
        engine: Any,
        name: str,
        render: Callable[[Messages], list[int]] | None = None,
        adapters: Mapping[str, AdapterFiles] | None = None,
    ) -> None:
        self._engine, self._name, self._render, self._adapters = engine, name, render, adapters or {}

    async def submit(self, operation: RunRequest) -> AsyncIterator[Update]:
        """Yield the updates of an engine request. Raises ValueError if it fails."""
        stream = self._engine.stream(
            operation.prompt_token_ids,
            operation.params,
            f"{self._name}-{operation.key}",
            pooling=operation.pooling,
            adapter=self._adapters.get(operation.adapter),
        )
        async with aclosing(stream) as updates:
            async for update in updates:
                if update.finish_reason == "error":
                    raise ValueError(update.error)
                yield update

    async def abort(self, key: int, choice: int) -> None:
        """End a choice of an engine request."""
        await self._engine.abort(f"{self._name}-{key}", choice)

    async def render(self, messages: Messages) -> list[int] | None:
        """Return the token ids of a conversation; None if they do not fit into the context."""
        assert self._render is not None, "a search with messages has a template"
        ids = await asyncio.to_thread(self._render, messages)
        return ids if len(ids) < self._engine.max_model_len else None

    async def call(self, operation: Call) -> float | None:
        """Return the score of a judge's function."""
        return await asyncio.to_thread(operation.judge.function, operation.question, operation.answer)

    async def price(self) -> BranchPrice | None:
        """Return the cost of a branch now; None if it is not known."""
        return BranchPrice.of(await self._engine.stats(), self._engine.config.block_size)
