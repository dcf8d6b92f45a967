"""State shared by all handlers: the engine, the options, the metrics, and the flag that the server is draining."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.executors.pooling import Pooling
from ..engine.scheduling.sampling_params import SamplingParams
from ..search.methods.registry import prefixed
from ..text.reasoning import thoughts_of
from ..text.tools.registry import shape_of
from .adapters import Adapters
from .capture.captures import Captures
from .encoding import Encoder
from .http.accounts import Accounts
from .http.clients import Owners
from .http.errors import ApiError, nearest
from .http.turns import ArrivalGate
from .operations.metrics import Metrics
from .operations.tracing import Tracing, exporter_for
from .options import ServerOptions
from .releases import Releases
from .rendering import Renderer, RenderHere
from .searches import SearchSupport
from .sender import current_request, note_request

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from ..engine.scheduling.outputs import SchedulerStats
    from ..text.output_processor import Update
    from ..text.protocols import ChatTemplateLike, TokenizerLike
    from ..text.sampling_defaults import SamplingDefaults

PROBE_S = 2.0
"""Seconds that /health and /metrics wait for the engine's answer, so that a hung engine does not block them."""


class Engine(Protocol):
    """The part of ``engine.frontends.client.EngineClient`` that the server uses."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> TokenizerLike: ...
    @property
    def chat_template(self) -> ChatTemplateLike | None: ...
    @property
    def sampling_defaults(self) -> SamplingDefaults: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def default_pooling(self) -> Pooling: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[Update]:
        """Yield deltas of all choices until each has had its terminal update; closing the iterator early aborts the
        request. ``options`` are the fields of ``engine.frontends.streams.RequestOptions``."""
        ...

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it; its stream gets a terminal update for each choice that this ends."""

    @property
    def pid(self) -> int | None: ...
    async def health(self) -> Any: ...
    async def stats(self) -> SchedulerStats: ...
    async def reset_prefix_cache(self) -> None: ...


class Serving:
    """The state of one server: made with the app, found by handlers as ``request.app.state.serving``."""

    def __init__(self, engine: Engine, options: ServerOptions, renderer: Renderer | None = None) -> None:
        self.engine = engine
        self.options = options
        self.metrics = Metrics(options.model_names[0])
        for each in getattr(engine, "collectors", ()):  # of a fleet
            self.metrics.registry.register(each)
        self.encoder = Encoder()
        self.turns = ArrivalGate()
        self.owners = Owners()
        self.accounts = Accounts(self.metrics.registry)
        self.adapters = Adapters(engine, options, self.metrics.registry)
        self.search = SearchSupport(engine, options)
        self.releases = Releases(self.metrics.registry, self.version_names, options.releases)
        self.releases.start()
        self.captures = None if options.capture_dir is None else self._captures()
        self.renderer = renderer or RenderHere()
        endpoint = options.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(exporter_for(endpoint), options.model_names[0])
        self.started = int(time.time())
        self.draining = False
        self.handed_over = False
        """Another process has the listening socket: every answer closes its connection."""
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        template = getattr(engine.chat_template, "source", None)
        self.shape = shape_of(getattr(engine.chat_template, "tool_source", None), options.tool_call_parser)
        self.shape_without_tools = shape_of(template, options.tool_call_parser)
        """Format of calls in earlier turns if no tools are given; some models use another template then."""
        self.thoughts = thoughts_of(options.reasoning_parser, template)
        self.channels = self.shape.channels or (self.thoughts is not None and self.thoughts.channels)
        """True if answers come in channels, for any request."""
        tokenizer = engine.tokenizer
        special = sorted(getattr(tokenizer, "special_ids", ()))
        self.special_ids = {name: token for token in special if (name := tokenizer.token_text(token))}
        """Ids of special tokens, by spelling."""

    def _captures(self) -> Captures:
        return Captures(self.options, self.metrics, self.engine.tokenizer.decode)

    def version_names(self) -> list[str]:
        """List the names that a release may have as versions: the model's and those of adapters."""
        return [*self.options.model_names, *(each.name for each in self.adapters.entries())]

    @property
    def model_name(self) -> str:
        """Name in answers: of the request's adapter, or of the model."""
        return current_request().adapter or self.options.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; None means the served model. For a released name a version is chosen for
        this request, and for an adapter's the adapter.

        Raises:
            ApiError: 404 with the names that are served.
        """
        names = self.options.model_names
        if name is None or name in names:
            return
        version = self.releases.choose(name, current_request().sender.key)
        if version is not None:
            note_request(version=version)
            name = version.model
        if name in names:
            return
        if self.adapters.find(name) is not None:
            note_request(adapter=name)
        elif (searched := prefixed(name)) is not None and (
            searched[1] in names or self.adapters.find(searched[1]) is not None
        ):
            note_request(method=searched[0], adapter="" if searched[1] in names else searched[1])
        else:
            names = (*names, *(each.name for each in self.adapters.entries()), *self.releases.names())
            hint = nearest(name[:100], names) or f"; this server has {', '.join(map(repr, names))}"
            message = f"the model {name[:100]!r} does not exist{hint}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def enter(self) -> None:
        """Account for a request that begins to use the engine."""
        self.in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        """Account for a request that has ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
