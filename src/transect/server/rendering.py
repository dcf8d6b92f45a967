"""Rendering of chat templates in processes that can be killed, so that no template blocks the server."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..text.chat_template import ChatTemplate
from ..text.grammar.fair_pool import FairPool
from ..text.protocols import ChatTemplateLike
from ..text.template_worker import TemplateWorker
from .http.lanes import in_lane

T = TypeVar("T")
WORKERS = 2


class Renderer(Protocol):
    """Interface of chat-template renderers."""

    async def render(
        self,
        template: ChatTemplateLike,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """Render messages like ``ChatTemplate.render``. Raises ValueError as that does."""
        ...


class RenderHere:
    """Renders in a thread of this process; only the template's sandbox limits it."""

    async def render(
        self,
        template: ChatTemplateLike,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        return await asyncio.to_thread(template.render, messages, add_generation_prompt, **kwargs)


class RenderApart:
    """Renders in separate processes, which are killed if a rendering takes too long or too much memory.

    Args:
        workers: largest number of workers; each starts when first needed.
        limits: arguments of ``TemplateWorker``.
    """

    def __init__(self, workers: int = WORKERS, **limits: Any) -> None:
        self._pool = FairPool(workers, "transect-template")
        self._workers = [TemplateWorker(**limits) for _ in range(workers)]
        # The one that was used last comes first: the others need not be started before they are needed.
        self._idle: queue.LifoQueue[TemplateWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def start(self, template: ChatTemplate) -> None:
        """Start a process, so that the first chat does not wait for it. Returns at once."""
        self._pool.submit("", lambda: self._with_worker(lambda worker: worker.start(template)))

    async def render(
        self,
        template: ChatTemplateLike,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        def render(worker: TemplateWorker) -> str:
            return worker.render(template, messages, add_generation_prompt, kwargs)  # type: ignore[arg-type]

        return await in_lane(self._pool, 0, self._with_worker, render)

    def close(self) -> None:
        """End all processes, even busy ones."""
        self._pool.close()
        for worker in self._workers:
            worker.close()

    def _with_worker(self, do: Callable[[TemplateWorker], T]) -> T:
        worker = self._idle.get()  # there are as many as threads
        try:
            return do(worker)
        finally:
            self._idle.put(worker)
