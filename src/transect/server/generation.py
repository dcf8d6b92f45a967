"""All engine requests behind one HTTP request, as one stream of updates.

A completions request may hold several prompts, each of which is an engine request with ``n`` choices; a chat is one.
Leaving the ``async with`` block ends whatever still runs in the engine, whatever the reason for leaving was.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ..engine.executors.pooling import Pooling
from ..engine.frontends.async_engine import EngineDeadError
from ..engine.frontends.mailbox import Mailbox
from ..engine.scheduling.policies.admission import QueueFull
from ..engine.scheduling.sampling_params import SamplingParams
from .http.clients import current_client
from .http.errors import ApiError, bad_value
from .http.lifetime import Deadline
from .openai.protocol import FIELDS
from .openai.replies import PromptDetails, Usage
from .operations import request_log
from .operations.metrics import RequestTimer
from .sender import current_request
from .serving import Serving
from .watching import RequestWatch

if TYPE_CHECKING:
    from ..checkpoints.peft_config import AdapterFiles
    from ..engine.scheduling.outputs import RequestTimes
    from ..text.output_processor import Given, Update
    from ..text.outputs import RequestOutput
    from .capture.slips import RequestContent
    from .operations.tracing import RequestSpan


GROUP = 64
"""Engine requests of one HTTP request that run at the same time, if the HTTP request makes many short ones."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as text (None if it came as token ids) and as token ids. ``prompt_logprobs_start``: see
    ``SamplingParams``, of which it is the only field that may differ between the prompts of a ``Generation``."""

    text: str | None
    token_ids: list[int]
    prompt_logprobs_start: int = 0


@dataclass(slots=True)
class Event:
    """An update of one choice. ``choice`` counts through all prompts: prompt index * n + index in the engine
    request."""

    prompt: int
    choice: int
    update: Update


class Generation:
    """Run prompts and yield their updates as they arrive.

    Args:
        serving: gives the engine, the metrics and the time limit.
        prompts: at least one.
        params: the same for all of them.
        priority: lower runs earlier.
        deadline: time by which the last token must have arrived; None for the server's limit from now.
        pooling: return vectors of the prompts (``RequestOutput.pooled``).
        adapter: name of the adapter; None for the one that the HTTP request has chosen.
        part_of: id, if this is a part of a larger work.
        given: tokens that the answers begin with, see ``Request.output_token_ids``; they count as part of the prompt.
    """

    def __init__(
        self,
        serving: Serving,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        priority: int = 0,
        deadline: Deadline | None = None,
        pooling: Pooling | None = None,
        *,
        adapter: str | None = None,
        part_of: str | None = None,
        given: Given | None = None,
    ) -> None:
        self.id = part_of or uuid.uuid4().hex
        self.created = int(time.time())
        self.prompts, self.params = prompts, params
        self.completion_tokens = 0
        self._cached_tokens = [0] * len(prompts)
        self._serving, self._priority, self._pooling, self._given = serving, priority, pooling, given
        self._began = time.monotonic()
        self._first_token_s: float | None = None
        self._approximate = False
        self._reasons: list[str] = []
        self._times: RequestTimes | None = None
        """Times of the choice that ended last."""
        self._counted = False
        self._source: AsyncGenerator[Event, None] | None = None
        self._held: Event | None = None
        current = current_request()
        self._client, self._adapter = current_client(), current.adapter if adapter is None else adapter
        affinity = current.sender.affinity
        self._session = affinity and f"{self._client.name} {affinity}"
        self._dropped: set[int] = set()
        """Choices that ``drop`` has ended."""
        serving.owners.note(self.id)
        self._deadline = deadline or Deadline(serving.options.request_timeout_s)
        self._watch = RequestWatch(serving, self.id, len(prompts), part=part_of is not None)

    def describe(self, content: RequestContent) -> Self:
        """Describe the request, for captures and for the metrics of released versions; returns this object."""
        self._watch.describe(content)
        return self

    def usage(self) -> Usage:
        """Return the token counts so far."""
        cached = PromptDetails(cached_tokens=sum(self._cached_tokens))
        prompt, completion = sum(len(prompt.token_ids) for prompt in self.prompts), self.completion_tokens
        prompt += sum(len(tokens or ()) for tokens in self._given or ())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=cached,
            continued="approximately" if self._approximate else None,
        )

    async def start(self) -> None:
        """Submit everything and wait for the first update, so that a refusal still has a status code of its own.

        Raises:
            ApiError: the engine refused (400, 429, 503), is gone (503) or took too long (504). Nothing is left running.
        """
        self._watch.begin()
        try:
            self._source = self._traced(0, self.prompts[0]) if len(self.prompts) == 1 else self._merged()
            self._held = await self._next()
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next update.

        Raises:
            ApiError: this request failed; nothing more will come.
        """
        if self._held is not None:
            event, self._held = self._held, None
            return event
        following = await self._next()
        if following is None:
            raise StopAsyncIteration
        return following

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def whole(self) -> list[RequestOutput]:
        """Start, and wait for the end: one complete result for each prompt, in their order.

        Raises:
            ApiError: see ``start`` and ``__anext__``.
        """
        results: dict[int, RequestOutput] = {}
        async with self:
            await self.start()
            async for event in self:
                if event.update.final is not None:
                    results[event.prompt] = event.update.final
        return [results[index] for index in range(len(self.prompts))]

    async def drop(self, choice: int) -> None:
        """End a choice of a request with one prompt; its last update has the finish reason "abort"."""
        self._dropped.add(choice)
        await self._serving.engine.abort(f"{self.id}-0", choice)

    async def aclose(self) -> None:
        """Abort everything that still runs in the engine. May be called repeatedly."""
        if self._source is not None:
            await self._source.aclose()
        usage = self.usage()
        if not self._counted:
            self._counted = True
            self._serving.accounts.spend(self._client, usage.prompt_tokens, usage.completion_tokens)
            if self._adapter:
                self._serving.adapters.count(self._adapter, usage.prompt_tokens, usage.completion_tokens)
            self._watch.end(self._first_token_s, self.completion_tokens / (len(self.prompts) * self.params.n))
        request_log.note(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            finish_reasons=self._reasons,
            first_token_seconds=self._first_token_s,
            **request_log.engine_seconds(self._times),
        )

    async def _next(self) -> Event | None:
        assert self._source is not None
        try:
            if self._deadline.limit_s is None:
                return await anext(self._source, None)
            async with self._deadline:
                return await anext(self._source, None)
        except ApiError as error:
            self._watch.failed(error)
            raise

    def _traced(self, index: int, prompt: Prompt) -> AsyncGenerator[Event, None]:
        """Return the updates of one engine request, in a span if the server makes spans."""
        tracing = self._serving.tracing
        updates = self._updates_of_adapter(index, prompt) if self._adapter else self._updates(None, index, prompt)
        if tracing is None:
            return updates
        span = tracing.request(f"{self.id}-{index}", self.params, len(prompt.token_ids))
        return _watched(span, updates)

    async def _updates_of_adapter(self, index: int, prompt: Prompt) -> AsyncGenerator[Event, None]:
        """Yield the updates of one engine request, with the adapter that was chosen."""
        async with (
            self._serving.adapters.use(self._adapter) as adapter,
            aclosing(self._updates(adapter, index, prompt)) as events,
        ):
            self._watch.adapted(adapter.id)
            async for event in events:
                yield event

    async def _updates(self, adapter: AdapterFiles | None, index: int, prompt: Prompt) -> AsyncGenerator[Event, None]:
        """Yield the updates of one engine request. Errors of the engine are raised as ``ApiError``."""
        params = self.params
        if prompt.prompt_logprobs_start:
            params = params.with_(prompt_logprobs_start=prompt.prompt_logprobs_start)
        timer = RequestTimer(
            self._serving.metrics, time.monotonic(), len(prompt.token_ids), params.n, params.max_tokens
        )
        stream = self._serving.engine.stream(
            prompt.token_ids,
            params,
            f"{self.id}-{index}",
            prompt=prompt.text,
            priority=self._priority,
            pooling=self._pooling,
            client=self._client.name,
            weight=self._client.weight,
            adapter=adapter,
            output_token_ids=self._given,
            session=self._session,
        )
        try:
            async with aclosing(stream) as updates:  # type: ignore[type-var]
                async for update in updates:
                    yield self._event(index, update, timer)
            timer.request_finished(time.monotonic())
        except QueueFull as error:
            seconds = max(1, round(error.retry_after))
            status, code = (429, "client_limit") if error.own else (503, "queue_full")
            message = f"{error.reason}: send the request again in about {seconds} s"
            raise ApiError(status, message, code=code, headers={"Retry-After": str(seconds)}) from None
        except EngineDeadError as error:
            raise ApiError(503, f"the engine has stopped: {error}", code="engine_dead") from None
        except ValueError as error:
            raise bad_value(str(error), FIELDS) from None
        except (GeneratorExit, asyncio.CancelledError):
            timer.left()
            raise

    async def _merged(self) -> AsyncGenerator[Event, None]:
        """Yield the updates of all engine requests in the order of arrival."""
        mailbox: Mailbox[Event | Exception | None] = Mailbox()
        tasks = [asyncio.create_task(self._pump(i, prompt, mailbox)) for i, prompt in enumerate(self.prompts)]
        left = len(tasks)
        try:
            while left:
                for item in await mailbox.take():
                    if item is None:
                        left -= 1
                    elif isinstance(item, Exception):
                        raise item
                    else:
                        yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, prompt: Prompt, mailbox: Mailbox[Event | Exception | None]) -> None:
        """Copy one engine request's updates to the common mailbox; None marks its end."""
        try:
            async with aclosing(self._traced(index, prompt)) as updates:
                async for event in updates:
                    mailbox.put(event)
        except Exception as error:
            mailbox.put(error)
        else:
            mailbox.put(None)

    def _event(self, index: int, update: Update, timer: RequestTimer) -> Event:
        if update.given:
            return Event(index, index * self.params.n + update.index, update)
        timer.tokens(update.index, len(update.token_ids), time.monotonic())
        timer.engine_times(update.times)
        if update.times is not None and update.times.finished is not None:
            self._times = update.times
        self.completion_tokens += len(update.token_ids)
        self._approximate = self._approximate or update.approximate
        self._cached_tokens[index] = max(self._cached_tokens[index], update.num_cached_tokens)
        if update.token_ids and self._first_token_s is None:
            self._first_token_s = round(time.monotonic() - self._began, 4)
        if update.finish_reason is not None:
            self._reasons.append(update.finish_reason)
            timer.choice_finished(update.finish_reason)
        if update.finish_reason == "error":
            raise ApiError(500, update.error or "the engine failed while running this request", code="engine_error")
        if update.finish_reason == "abort" and update.index not in self._dropped:
            raise ApiError(503, update.error or "the request was ended by the server", code="aborted")
        if update.final is not None:
            self._watch.answered(index, update.final)
        return Event(index, index * self.params.n + update.index, update)


async def whole_in_groups(
    serving: Serving,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    priority: int,
    deadline: Deadline,
    pooling: Pooling | None = None,
) -> list[RequestOutput]:
    """Run any number of prompts in groups and return their results in order, so that one HTTP request does not fill the
    queue for others or for itself.

    Raises:
        ApiError: see ``Generation``.
    """
    size = min(GROUP, serving.options.max_prompts)
    results: list[RequestOutput] = []
    for start in range(0, len(prompts), size):
        group = prompts[start : start + size]
        results += await Generation(serving, group, params, priority, deadline, pooling=pooling).whole()
    return results


async def _watched(span: RequestSpan, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yield the events, and record them in a span that ends with them."""
    with span:
        async with aclosing(events):
            async for event in events:
                span.saw(event.update)
                yield event
