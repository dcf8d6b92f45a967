"""Settings of the HTTP server: one frozen description, from which the options of ``transect serve`` are derived."""

from __future__ import annotations

import ipaddress
import json
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ..spec.settings import About, check_values

if TYPE_CHECKING:
    from .http.clients import ApiKey

VERIFIERS, HEADS = "--verifier", "--reward-head"


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the HTTP server.

    Attributes:
        model_names: Model name in requests; repeatable. Default: the model's. The first one is in answers.
        lora_modules: Adapter to serve beside the model, ``NAME=DIR``; repeatable. Requests choose it by ``model``. It
            needs ``--enable-lora``.
        allowed_lora_dir: Directory below which adapters may be loaded while the server runs. The adapters in it are
            served by their directories' names, and loaded when first asked for. Default: none.
        verifiers: Python judge of searches, ``NAME=FILE.py:FUNCTION``; repeatable. It runs in a process with limits,
            and requests name it as ``search.score``.
        reward_heads: Reward model of searches, ``NAME=FILE``; repeatable. The file has a linear head over the hidden
            states of the model, or of the adapter called NAME.
        search_budget: Tokens of one search at most, over all its branches. Default: no limit.
        search_models: List model names with the prefixes of search methods, such as ``bon-MODEL``, in ``/v1/models``.
        host: Local address to listen on; 0.0.0.0 for all.
        port: Port to listen on; 0 for any free one.
        uds: Listen on this Unix socket, not on host and port.
        api_keys: Require this key; repeatable. ``/v1`` and the tokenizer routes want a key as a bearer token.
        admin_api_keys: Operator's key, for routes that change state or show all requests; repeatable.
            Without it these routes are shut if there are other keys, and open if there are none.
        protect_metrics: Require a key for ``/metrics`` too.
        trusted_proxies: Address or network of a proxy whose ``X-Forwarded-For`` is trusted; repeatable.
        max_body_bytes: Longest request body in bytes.
        request_timeout_s: Seconds from a request's arrival to its last token, including rendering and encoding. Then
            the answer is a 504. Default: no limit.
        max_prompts: Prompts in one completions request.
        max_connections: Clients connected at the same time; default: as many as ``ulimit -n`` allows. Beyond that only
            ``/health`` and ``/metrics`` are answered.
        receive_timeout_s: Seconds for the head of a request, and the beginning of its body, to arrive. A body gets a
            second more for each 16 KiB. Then the answer is a 408.
        keep_alive_s: Seconds that an idle connection stays open. Set it above the idle time of a proxy
            in front of the server, which otherwise sends a request on a closed connection.
        grace_s: Seconds for running requests after SIGTERM.
        drain_timeout_s: Seconds for the streams of replaced engines after ``transect reload``.
        allowed_origins: Allowed origin of web pages (CORS); repeatable, or a JSON list; '' for none.
        allowed_methods: Allowed method of cross-origin requests; repeatable.
        allowed_headers: Allowed header of cross-origin requests; repeatable.
        allow_credentials: Allow credentials, such as cookies, in cross-origin requests.
        page: Serve the page at ``/``: chat, and live views of the engine.
        flow_dirs: Directory of a flow that the page shows to the operator; repeatable.
        root_path: Path prefix under which a proxy serves this server, such as ``/llm``.
        ssl_certfile: Speak TLS with this certificate (PEM).
        ssl_keyfile: Key of the certificate (PEM), if in a separate file.
        tool_call_parser: Syntax of tool calls: hermes, qwen3_coder, mistral_v11 ...; auto reads the chat template.
            ``text/tools/`` has them all.
        reasoning_parser: Reasoning markers: qwen3, mistral ...; auto reads the chat template; none: reasoning is text.
        request_log: Write a line for each request to standard error. No texts are logged.
        log_level: Lowest level of these lines: warning for 4xx, error for 5xx.
        otlp_traces_endpoint: Send OpenTelemetry spans of requests to this address: ``http://HOST:4318`` or ``grpc://HOST:4317``.
        capture_dir: Directory for captures of requests and answers of consenting clients. Default: nothing is
            captured.
        capture_rate: Share of the consenting requests that are captured, 0 to 1.
        capture_consent: opt-out: capture unless a request declines; opt-in: only requests that agree.
        capture_inputs: Capture the texts of embeddings requests too.
        capture_rules: File of further redaction rules, ``NAME=REGEX`` on each line; ``NAME=`` turns a built-in rule
            off.
        capture_bytes: Most bytes of captures; the oldest leave first.
        capture_days: Days for which captures are kept.
        releases: JSON file of released names with their versions and weights; changes by ``/v1/releases`` are
            written to it.

    Raises:
        ValueError: a value is out of its range, or a file cannot be used.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"model_names": "Server", "capture_dir": "Captures and releases"}

    model_names: Annotated[tuple[str, ...], About(option="served-model-name")]
    lora_modules: tuple[str, ...] = ()
    allowed_lora_dir: str | None = None
    verifiers: Annotated[tuple[str, ...], About(option="verifier")] = ()
    reward_heads: Annotated[tuple[str, ...], About(option="reward-head")] = ()
    search_budget: Annotated[int | None, About(least=1)] = None
    search_models: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, About(least=0, most=65535)] = 8000
    uds: str | None = None
    api_keys: Annotated[tuple[str, ...], About(option="api-key", variable="TRANSECT_API_KEY")] = ()
    """Keys as text, or with their clients (``ApiKey``)."""
    admin_api_keys: Annotated[tuple[str, ...], About(option="admin-api-key", variable="TRANSECT_ADMIN_API_KEY")] = ()
    protect_metrics: bool = False
    trusted_proxies: tuple[str, ...] = ()
    max_body_bytes: Annotated[int, About(least=1024)] = 8 * 1024 * 1024
    request_timeout_s: Annotated[float | None, About(above=0)] = None
    max_prompts: Annotated[int, About(least=1)] = 256
    max_connections: Annotated[int | None, About(least=1)] = None
    receive_timeout_s: Annotated[float, About(above=0)] = 20.0
    keep_alive_s: Annotated[int, About(least=0)] = 5
    grace_s: Annotated[float, About(least=0)] = 30.0
    drain_timeout_s: Annotated[float, About(least=0)] = 60.0
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    page: bool = True
    flow_dirs: Annotated[tuple[str, ...], About(option="flow")] = ()
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = "auto"
    request_log: Literal["off", "text", "json"] = "off"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_traces_endpoint: str | None = None
    capture_dir: str | None = None
    capture_rate: Annotated[float, About(least=0, most=1)] = 1.0
    capture_consent: Literal["opt-out", "opt-in"] = "opt-out"
    capture_inputs: bool = False
    capture_rules: str | None = None
    capture_bytes: Annotated[int, About(least=2**20)] = 2**30
    capture_days: Annotated[float, About(above=0)] = 30.0
    releases: str | None = None

    def __post_init__(self) -> None:
        from ..search.judges import BUILTIN
        from ..search.programs import named_places
        from ..text.reasoning import thoughts_of
        from ..text.tools.registry import shape_of

        check_values(self)
        if not self.model_names or not all(self.model_names):
            raise ValueError("model_names must hold at least one non-empty name")
        clash = sorted(named_modules(self.lora_modules).keys() & set(self.model_names))
        if clash:
            raise ValueError(f"{clash[0]} is the name of the model and of an adapter: give one of them another name")
        judges = [*named_places(self.verifiers, VERIFIERS), *named_places(self.reward_heads, HEADS)]
        for name in judges:
            if name in BUILTIN or judges.count(name) > 1:
                raise ValueError(f"{name} is the name of another judge of searches: choose another for it")
        keys = [*(each.key for each in self.keys), *self.admin_api_keys]
        if any(not key or not key.isascii() for key in keys):
            raise ValueError("api keys must be non-empty and plain ASCII")
        if self.protect_metrics and not keys:
            raise ValueError("protect_metrics needs keys: give api_keys or admin_api_keys")
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path must begin with a slash and not end with one, got {self.root_path!r}")
        _check_tls(self.ssl_certfile, self.ssl_keyfile)
        shape_of(None, self.tool_call_parser)
        thoughts_of(self.reasoning_parser)
        if self.capture_dir is not None:
            from ..flow.watch.captures import private_folder
            from .capture.redaction import rules_in

            private_folder(self.capture_dir)
            if self.capture_rules is not None:
                rules_in(self.capture_rules)
        if self.releases is not None and Path(self.releases).exists():
            from .releases import releases_in

            releases_in(Path(self.releases))
        if self.otlp_traces_endpoint is not None:
            from .operations.tracing import exporter_for

            exporter_for(self.otlp_traces_endpoint).shutdown()  # reports an error now

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """``api_keys`` with their clients; keys given as text alone are named ``key-1`` and so on."""
        from .http.clients import ApiKey, Client

        return tuple(
            each if isinstance(each, ApiKey) else ApiKey(each, Client(f"key-{number}"))
            for number, each in enumerate(self.api_keys, 1)
        )


def named_modules(modules: Iterable[str]) -> dict[str, str]:
    """Parse directories by name, from ``NAME=DIR`` or vLLM's JSON objects with ``name`` and ``path``.

    Raises:
        ValueError: a text is neither, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in modules:
        name, _, path = text.partition("=")
        if text.startswith("{"):
            try:
                given = json.loads(text)
                name, path = given["name"], given["path"]
            except (ValueError, KeyError, TypeError):
                name = path = ""
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            raise ValueError(f"--lora-modules takes NAME=DIR, not {text!r}")
        if name in found:
            raise ValueError(f"--lora-modules names {name} twice: give each adapter a name of its own")
        found[name] = path
    return found


def _check_network(text: str) -> None:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"trusted_proxies must hold addresses or networks such as 10.0.0.0/8, got {text!r}") from None


def _check_tls(certificate: str | None, key: str | None) -> None:
    """Load the certificate files once, so that errors in them are reported before a model is loaded."""
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
