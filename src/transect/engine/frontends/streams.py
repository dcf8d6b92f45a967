"""``OutputStream``: one request with the task that waits for its updates, whichever engine runs it.

An engine process can end in the middle of an answer. What is known of the answer then stands in the caller's process:
its tokens, text, stop strings and log-probabilities. An ``OutputStream`` carries all of this to another engine, whose
first news is the next token (``Request.output_token_ids``).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

import msgspec

from ...checkpoints.peft_config import AdapterFiles
from ...text.output_processor import Given, OutputProcessor, RunningRequest, Update, together
from ..executors.pooling import Pooling
from ..scheduling.outputs import RequestTimes
from ..scheduling.sampling_params import SamplingParams
from . import wire
from .inputs import text_options
from .mailbox import Mailbox


class EngineDeadError(RuntimeError):
    """The engine process has ended; the message says what is known of the cause."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineHealth:
    """``state``: ``ok``, ``hung`` (no sign of life for a while) or ``dead``; ``detail`` is a sentence."""

    state: Literal["ok", "hung", "dead"]
    detail: str
    pids: tuple[int, ...] = ()
    """Process ids of the engines that live."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The keyword arguments of ``stream``, for ``AsyncEngine`` and ``Replicas``. Those that the engine receives are
    explained in ``Request``."""

    prompt: str | None = None
    """Text of the prompt; None if it came as token ids."""
    priority: int = 0
    pooling: Pooling | None = None
    client: str = ""
    weight: float = 1.0
    adapter: AdapterFiles | None = None
    output_token_ids: Given | None = None
    """Tokens that the client gives the answers to begin with."""
    session: str = ""
    """Name that the requests of a session share, for the router; empty for none."""


class OutputStream:
    """A request that has passed all checks, with its updates for one task.

    Args:
        request_id: unique among the running requests.
        prompt_token_ids: at least one.
        params: must have a seed if another engine may continue the answer.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> None:
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self.params, self.options = params, options
        self.mailbox: Mailbox[Update | Exception] = Mailbox()
        self.state: RunningRequest | None = None
        """The answer so far, while no engine has the request; None before the first engine and after the end."""
        self.left = params.n - (options.output_token_ids or ()).count(None)
        """Choices whose last update has not been taken."""
        self.number = 0
        """Number of the request's submit to its engine."""
        self.aborted: list[int | None] = []
        """Choices that were aborted while no engine had the request; None for all of them."""
        self.engine: Any = None
        """The ``AsyncEngine`` that had the request last, if there are several."""
        self.deaths = self.all_deaths = 0
        """Number of engines that ended while running the request: without a token from it in between, and in total."""
        self._arrival = time.monotonic()
        self._times: dict[int, RequestTimes] = {}
        """Times of each choice, as reported by the first engine with an update of it."""

    @property
    def begun(self) -> bool:
        """True once an engine has left the request unfinished."""
        return self.state is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far, while no engine has the request."""
        return 0 if self.state is None else sum(len(tokens) for tokens in self.state.output_token_ids() if tokens)

    def submit(self) -> wire.Submit:
        """Build the message that queues the request in an engine."""
        fields = {field.name: getattr(self.params, field.name) for field in dataclasses.fields(self.params)}
        given = self.options
        sharing = given.priority, given.pooling, given.client, given.weight
        message = wire.Submit(self.request_id, self.prompt_token_ids, fields, self.number, *sharing)
        if given.adapter is not None:
            message.adapter, message.adapter_path = given.adapter.id, str(given.adapter.path)
        if self.state is not None:
            message.output_token_ids, message.arrival = self.state.output_token_ids(), self._arrival
        elif given.output_token_ids is not None:
            message.output_token_ids, message.given = given.output_token_ids, True
        return message

    def enter(self, processor: OutputProcessor) -> list[Update]:
        """Hand the answer so far to the text side of an engine. Returns the updates of tokens that the client gave."""
        if self.state is not None:
            processor.adopt(self.request_id, self.state)
            return []
        processor.add(self.request_id, self.options.prompt, self.prompt_token_ids, **text_options(self.params))
        given = self.options.output_token_ids
        return [] if given is None else processor.begin(self.request_id, given)

    async def take(self) -> list[Update | Exception]:
        """Wait for updates and return them; consecutive updates of one choice are merged."""
        news = together(await self.mailbox.take())
        for update in news:
            if isinstance(update, Update) and update.times is not None:
                # An engine that continues an answer knows nothing of its beginning.
                first = self._times.setdefault(update.index, update.times)
                update.times = msgspec.structs.replace(first, finished=update.times.finished)
        return news
