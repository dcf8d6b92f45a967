"""What every handler shares: the engine, the options, the metrics, and whether the server still accepts work."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.executors.pooling import Pooling
from ..engine.scheduling.sampling_params import SamplingParams
from ..text.reasoning import thoughts_of
from ..text.tools.registry import shape_of
from .encoding import Encoder
from .http.accounts import Accounts
from .http.clients import ApiKey, Client
from .http.errors import ApiError, nearest
from .http.owners import Owners
from .http.turns import Turns
from .operations.metrics import Metrics
from .operations.tracing import Tracing, exporter_for
from .rendering import Renderer, RenderHere

if TYPE_CHECKING:
    from ..engine.scheduling.outputs import SchedulerStats
    from ..text.output_processor import Update
    from ..text.protocols import ChatTemplateLike, TokenizerLike
    from ..text.sampling_defaults import SamplingDefaults

PROBE_S = 2.0
"""A hung engine must not hang /health or /metrics: they wait this many seconds for an answer."""


class Engine(Protocol):
    """The narrow part of ``engine.async_engine.AsyncEngine`` that the server stands on."""

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
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        prompt: str | None = None,
        priority: int = 0,
        pooling: Pooling | None = None,
        client: str = "",
        weight: float = 1.0,
    ) -> AsyncIterator[Update]:
        """Deltas of all choices until each had its terminal update; closing the iterator early aborts the request."""
        ...

    @property
    def pid(self) -> int | None: ...
    async def health(self) -> Any: ...
    async def stats(self) -> SchedulerStats: ...
    async def reset_prefix_cache(self) -> None: ...


@dataclass(frozen=True)
class ServerOptions:
    """How the HTTP side behaves.

    Attributes:
        model_names: names that requests may give as ``model``; the first is the one in answers.
        api_keys: where not empty, /v1 and the tokenizer routes want one of them as a bearer token. Keys that are text
            alone are named ``key-1`` and so on.
        admin_api_keys: keys of operators, for routes that change the server's state or show the requests of others.
            Without any, these routes are shut if there are ``api_keys``, and open if there are none.
        protect_metrics: /metrics wants a key too.
        trusted_proxies: addresses and networks of proxies whose ``X-Forwarded-For`` tells a client's address.
        max_body_bytes: longest request body.
        request_timeout_s: seconds from arrival to the last token; None for no limit.
        max_prompts: prompts in one completions request.
        max_connections: clients connected at the same time; None for what the limit of open files allows.
        receive_timeout_s: seconds in which the head of a request must arrive, and the beginning of its body.
        keep_alive_s: seconds that a connection without a request stays open after an answer.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: what web pages of other origins may do
            (CORS); ``*`` is all.
        root_path: where a proxy shows this server: ``/llm``.
        ssl_certfile, ssl_keyfile: PEM files; where they are given the server speaks TLS.
        tool_call_parser: the form of tool calls (``text.tools.registry``); ``auto``: what the chat template says.
        reasoning_parser: how thoughts are marked (``text.reasoning``); ``auto``: what the chat template says; ``none``:
            they are text like any other.
        otlp_traces_endpoint: where spans of requests are sent (``tracing``); None: there are none.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str | ApiKey, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    protect_metrics: bool = False
    trusted_proxies: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    request_timeout_s: float | None = None
    max_prompts: int = 256
    max_connections: int | None = None
    receive_timeout_s: float = 20.0
    keep_alive_s: int = 5
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = "auto"
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError("model_names must hold at least one non-empty name")
        keys = [*(each.key for each in self.keys), *self.admin_api_keys]
        if any(not key or not key.isascii() for key in keys):
            raise ValueError("api keys must be non-empty and plain ASCII")
        if self.protect_metrics and not keys:
            raise ValueError("protect_metrics needs keys: give api_keys or admin_api_keys")
        for proxy in self.trusted_proxies:
            check_network(proxy)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path must begin with a slash and not end with one, got {self.root_path!r}")
        _check_tls(self.ssl_certfile, self.ssl_keyfile)
        if self.max_body_bytes < 1024:
            raise ValueError(f"max_body_bytes must be at least 1024, got {self.max_body_bytes}")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s must be above 0, got {self.request_timeout_s}")
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, got {self.max_connections}")
        if not self.receive_timeout_s > 0:
            raise ValueError(f"receive_timeout_s must be above 0, got {self.receive_timeout_s}")
        if self.keep_alive_s < 0:
            raise ValueError(f"keep_alive_s must be 0 or more, got {self.keep_alive_s}")
        shape_of(None, self.tool_call_parser)
        thoughts_of(self.reasoning_parser)
        if self.otlp_traces_endpoint is not None:
            exporter_for(self.otlp_traces_endpoint).shutdown()  # says now what is wrong with it

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """``api_keys`` with the clients that they stand for."""
        return tuple(
            each if isinstance(each, ApiKey) else ApiKey(each, Client(f"key-{number}"))
            for number, each in enumerate(self.api_keys, 1)
        )


def check_network(text: str) -> None:
    """Raises ValueError where a text is no address and no network."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"trusted_proxies must hold addresses or networks such as 10.0.0.0/8, got {text!r}") from None


def _check_tls(certificate: str | None, key: str | None) -> None:
    """Load the files once, so that what is wrong with them is said before a model is loaded."""
    if certificate is None:
        if key is not None:
            raise ValueError("ssl_keyfile needs ssl_certfile, the certificate that it belongs to")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        named = f"ssl_certfile {certificate}" + (f" and ssl_keyfile {key}" if key is not None else "")
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"{named} cannot be used: {reason}") from None


class Serving:
    """The state of one server: made with the app, found by handlers as ``request.app.state.serving``."""

    def __init__(self, engine: Engine, options: ServerOptions, renderer: Renderer | None = None) -> None:
        self.engine = engine
        self.options = options
        self.metrics = Metrics(options.model_names[0])
        self.encoder = Encoder()
        self.turns = Turns()
        self.owners = Owners()
        self.accounts = Accounts(self.metrics.registry)
        self.renderer = renderer or RenderHere()
        endpoint = options.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(exporter_for(endpoint), options.model_names[0])
        self.started = int(time.time())
        self.draining = False
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        template = getattr(engine.chat_template, "source", None)
        self.shape = shape_of(getattr(engine.chat_template, "tool_source", None), options.tool_call_parser)
        self.shape_without_tools = shape_of(template, options.tool_call_parser)
        """How calls of earlier turns are told where no tools are given: some models have another template then."""
        self.thoughts = thoughts_of(options.reasoning_parser, template)
        self.channels = self.shape.channels or (self.thoughts is not None and self.thoughts.channels)
        """Answers come in channels, whatever is asked for."""
        tokenizer = engine.tokenizer
        special = sorted(getattr(tokenizer, "special_ids", ()))
        self.special_ids = {name: token for token in special if (name := tokenizer.token_text(token))}
        """Special tokens by their spelling."""

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.options.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; None means the one that is.

        Raises:
            ApiError: 404 with the names that are served.
        """
        names = self.options.model_names
        if name is not None and name not in names:
            hint = nearest(name[:100], names) or f"; this server has {', '.join(map(repr, names))}"
            message = f"the model {name[:100]!r} does not exist{hint}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def enter(self) -> None:
        """A request that uses the engine begins."""
        self.in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        """It ended, in whatever way."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
