"""One test-time search behind an HTTP request (``search/``): all of its engine requests, with the interface of a
``Generation`` that has one answer, and progress before it."""

from __future__ import annotations

import copy
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

from ..engine.scheduling.sampling_params import SamplingParams
from ..search.local import check_adapters, question_of
from ..search.machine import Call, RunRequest, SearchRun
from ..search.prices import BranchPrice
from ..search.settings import SearchSettings
from ..search.streams import follow
from ..search.tree import Messages, Tree
from ..text.output_processor import Update
from ..text.outputs import CompletionOutput, RequestMetrics, RequestOutput
from .answers import Answers
from .capture.slips import RequestContent
from .generation import Event, Generation, Prompt
from .http.errors import ApiError
from .http.lifetime import Deadline
from .openai.protocol import ChatMessage
from .openai.replies import PromptDetails, Usage
from .operations import request_log
from .prompts import chat_prompt
from .sender import current_request, note_request
from .serving import Serving
from .watching import RequestWatch


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """State of a search before its answer: counts and votes, or, at the end, the whole tree."""

    state: dict[str, Any]


class Searching:
    """A search, with the interface of a ``Generation``.

    Args:
        serving: gives the engine and the judges.
        search: settings.
        prompt: rendered conversation.
        messages: of the chat API.
        params: of each branch.
        answers: form of the answers; thoughts do not vote.
        template_kwargs: for further conversations of the method.
    """

    def __init__(
        self,
        serving: Serving,
        search: SearchSettings,
        prompt: Prompt,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        answers: Answers,
        priority: int = 0,
        deadline: Deadline | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.prompts, self.params = [prompt], params
        self.report: dict[str, Any] = {}
        """The tree as plain data, once the search has ended."""
        self._serving, self._priority = serving, priority
        self._deadline = deadline or Deadline(serving.options.request_timeout_s)
        self._template_kwargs = template_kwargs
        self._parts: dict[int, Generation] = {}
        self._source: AsyncGenerator[Event | SearchProgress, None] | None = None
        self._held: Event | SearchProgress | None = None
        serving.owners.note(self.id)
        self._watch = RequestWatch(serving, self.id, 1)
        note_request(version=None)  # branches are parts
        plain = [message.plain() for message in messages]
        adapter = current_request().adapter

        def answer_text(text: str) -> str:
            return text if answers.plain else answers.reader().feed(text, "stop").text

        def decode(ids: Sequence[int]) -> str:
            return serving.engine.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)

        adapters = serving.adapters.entries()
        judges = serving.search.judges(adapters)
        try:
            check_adapters(search, judges, {entry.name: entry for entry in adapters})
            self._run = SearchRun(
                serving.search.bounded(search), Tree(plain, question_of(plain), adapter, answer_text),
                prompt.token_ids, params, seed=secrets.randbits(63), max_model_len=serving.engine.max_model_len,
                decode=decode, judges=judges,
            )  # fmt: skip
        except ValueError as error:
            raise ApiError(400, str(error), param="search", code="invalid_value") from None

    def describe(self, content: RequestContent) -> Self:
        """Describe the request, for captures and for the metrics of released versions; returns this object."""
        self._watch.describe(content)
        return self

    def usage(self) -> Usage:
        """Return the token counts of all branches and judges so far."""
        parts = [each.usage() for each in self._parts.values()]
        prompt, drawn = sum(each.prompt_tokens for each in parts), sum(each.completion_tokens for each in parts)
        cached = sum(each.prompt_tokens_details.cached_tokens for each in parts)
        continued = any(each.continued for each in parts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=drawn,
            total_tokens=prompt + drawn,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
            continued="approximately" if continued else None,
        )

    async def start(self) -> None:
        """Begin, and wait for the first sign of the engine, so that a refusal has a status code of its own.

        Raises:
            ApiError: the engine refused, is gone, or took too long. Nothing is left running.
        """
        self._watch.begin()
        try:
            self._source = self._events()
            self._held = await anext(self._source, None)  # the start: nothing was submitted before
            self._held = await anext(self._source, None)
        except BaseException as error:
            if isinstance(error, ApiError):
                self._watch.failed(error)
            await self.aclose()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | SearchProgress:
        """Return the next progress, and at last the answer as one event. Raises ApiError as ``Generation``."""
        if self._held is not None:
            event, self._held = self._held, None
            return event
        assert self._source is not None
        try:
            return await anext(self._source)
        except ApiError as error:
            self._watch.failed(error)
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def whole(self) -> list[RequestOutput]:
        """Start, and return the answer. Raises ApiError as ``Generation.whole``."""
        found: list[RequestOutput] = []
        async with self:
            await self.start()
            async for event in self:
                if isinstance(event, Event) and event.update.final is not None:
                    found.append(event.update.final)
        return found

    async def aclose(self) -> None:
        """End everything that still runs in the engine. May be called repeatedly."""
        if self._source is not None:
            await self._source.aclose()
        self._watch.end()
        usage = self.usage()
        request_log.note(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            search=self._run.search.method.name,
        )

    async def _events(self) -> AsyncGenerator[Event | SearchProgress, None]:
        try:
            async with aclosing(follow(self._run, self)) as states:
                async for state in states:
                    yield SearchProgress(state)
        except ValueError as error:
            raise ApiError(500, str(error), code="search_failed") from None
        assert self._run.result is not None
        self.report = self._run.result.to_dict()
        yield SearchProgress(self.report)
        branch, prompt = self._run.result.branch, self.prompts[0]
        ending = {"finish_reason": branch.finish_reason, "stop_reason": branch.stop_reason}
        output = CompletionOutput(0, branch.all_text, branch.all_tokens, None, None, **ending)  # type: ignore[arg-type]
        final = RequestOutput(
            self.id, prompt.text, prompt.token_ids, None, [output], True, 0, RequestMetrics(time.monotonic())
        )
        self._watch.answered(0, final)
        update = Update(self.id, 0, output.text, list(output.token_ids), **ending, final=final)  # type: ignore[arg-type]
        yield Event(0, 0, update)

    # ---- what ``follow`` asks for ------------------------------------------------------------------------------------

    async def submit(self, operation: RunRequest) -> AsyncIterator[Update]:
        """Yield the updates of an engine request."""
        generation = Generation(
            self._serving,
            [Prompt(None, operation.prompt_token_ids)],
            operation.params,
            self._priority,
            copy.copy(self._deadline),
            operation.pooling,
            adapter=operation.adapter,
            part_of=f"{self.id}-{operation.key}",
        )
        self._parts[operation.key] = generation
        async with generation:
            await generation.start()
            async for event in generation:
                yield event.update

    async def abort(self, key: int, choice: int) -> None:
        """End a choice of an engine request."""
        await self._parts[key].drop(choice)

    async def render(self, messages: Messages) -> list[int] | None:
        """Return the token ids of a conversation; None if they do not fit into the context."""
        said = [ChatMessage.model_validate(message) for message in messages]
        try:
            prompt = await chat_prompt(self._serving, said, template_kwargs=self._template_kwargs)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return prompt.token_ids

    async def call(self, operation: Call) -> float | None:
        """Return a verifier's score."""
        return await self._serving.search.call(operation)

    async def price(self) -> BranchPrice | None:
        """Return the cost of a branch in the engine now."""
        engine = self._serving.engine
        return BranchPrice.of(await engine.stats(), engine.config.block_size)
