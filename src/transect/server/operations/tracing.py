"""Spans for OpenTelemetry: one for each engine request, with its time in the queue, in prefill and in decode.

A client that sends ``traceparent`` finds them under its own trace. The moments are the engine's own
(``engine.outputs.RequestTimes``); its clock is the one of this machine, which this process reads too. The names of
attributes are those of OpenTelemetry's conventions for generative models, and beside them those that vLLM uses. No text
of prompts or answers is sent.

The packages come with ``pip install 'transect[otel]'``. Environment variables of OpenTelemetry (``OTEL_SERVICE_NAME``,
``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ...) apply.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from ... import __version__

if TYPE_CHECKING:
    from ...engine.scheduling.outputs import RequestTimes
    from ...engine.scheduling.sampling_params import SamplingParams
    from ...text.output_processor import Update

GRPC_PORT = 4317
"""Port on which collectors listen for OTLP over gRPC."""
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
MISSING = (
    "--otlp-traces-endpoint needs OpenTelemetry, which is not installed ({}): pip install 'transect[otel]', or leave "
    "the option out"
)
_parent: ContextVar[Any] = ContextVar("transect_parent_span", default=None)


def exporter_for(endpoint: str) -> Any:
    """Build the exporter of spans to a collector: over gRPC to ``grpc://`` or port 4317, else as protobuf over HTTP.

    ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` (``grpc``, ``http/protobuf``) overrides this choice.

    Raises:
        ValueError: the address or the protocol is invalid, or the packages are not installed.
    """
    parts = urlsplit(endpoint)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname or port == -1:
        raise ValueError(
            f"--otlp-traces-endpoint {endpoint!r} is not an address: give http://HOST:4318 or grpc://HOST:4317"
        )
    by_address = "grpc" if parts.scheme == "grpc" or port == GRPC_PORT else "http/protobuf"
    protocol = os.environ.get(PROTOCOL) or by_address
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"{PROTOCOL} must be grpc or http/protobuf, not {protocol!r}")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            target = endpoint.replace("grpc://", "http://", 1)
            return Grpc(endpoint=target, insecure=parts.scheme != "https")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http
    except ImportError as error:
        raise ValueError(MISSING.format(error)) from None
    target = endpoint.replace("grpc://", "http://", 1)
    return Http(endpoint=target if parts.path.strip("/") else f"{target.rstrip('/')}/v1/traces")


class Tracing:
    """Makes the spans of one server and sends them from a thread of its own.

    Args:
        exporter: see ``exporter_for``.
        model_name: an attribute of all of them.

    Raises:
        ValueError: the packages are not installed.
    """

    def __init__(self, exporter: Any, model_name: str) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(MISSING.format(error)) from None
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "transect"}
        resource = Resource.create({**named, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("transect", __version__)
        self._model_name = model_name

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Make the spans of this task part of the trace that the request's headers name, if any."""
        from opentelemetry.propagate import extract

        _parent.set(extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers}))

    def request(self, request_id: str, params: SamplingParams, prompt_tokens: int) -> RequestSpan:
        """Start a span for one engine request."""
        attributes = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return RequestSpan(self._tracer, attributes)

    def close(self) -> None:
        """Send the remaining spans. Waits for a collector that does not respond as long as the exporter's time
        limit."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one engine request, from its submission to its last token; leaving the ``with`` block ends it."""

    def __init__(self, tracer: Any, attributes: dict[str, Any]) -> None:
        from opentelemetry.trace import SpanKind

        self._tracer = tracer
        self._began, self._submitted = time.time_ns(), time.monotonic()
        self._span = tracer.start_span(
            "llm_request", _parent.get(), SpanKind.SERVER, attributes=attributes, start_time=self._began
        )
        self._times: RequestTimes | None = None
        self._tokens = 0
        self._reasons: list[str] = []

    def saw(self, update: Update) -> None:
        """Record an update of one of the choices."""
        self._times = update.times or self._times
        self._tokens += len(update.token_ids)
        if update.finish_reason is not None:
            self._reasons.append(update.finish_reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        from opentelemetry.trace import Status, StatusCode

        ended, span = time.time_ns(), self._span
        span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
        span.set_attribute("gen_ai.usage.completion_tokens", self._tokens)
        span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        span.set_attribute("gen_ai.latency.e2e", (ended - self._began) / 1e9)
        if self._times is not None:
            self._parts(self._times)
        if isinstance(error, Exception):
            span.set_status(Status(StatusCode.ERROR, str(error)))
            span.set_attribute("error.type", type(error).__name__)
        elif error is not None:  # cancelled, or closed: the client has gone
            span.set_attribute("gen_ai.response.finish_reasons", [*self._reasons, "abort"])
        span.end(ended)

    def _parts(self, times: RequestTimes) -> None:
        """Record the times in the queue, in prefill and in decode, as attributes and as child spans."""
        from opentelemetry.trace import set_span_in_context

        here = set_span_in_context(self._span)
        offset = time.time_ns() - time.monotonic_ns()
        # The engine reads requests between steps: the wait for the end of a step belongs to the queue. And it does not
        # know when a stop string ended a choice.
        began = min(self._submitted, times.arrival)
        moments = (began, times.first_scheduled, times.first_token, times.finished or time.monotonic())
        names = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
        for title, name, start, end in zip(("queue", "prefill", "decode"), names, moments, moments[1:], strict=False):
            if start is None or end is None:
                return
            self._span.set_attribute(f"gen_ai.latency.{name}", end - start)
            if title == "prefill":
                self._span.set_attribute("gen_ai.latency.time_to_first_token", end - began)
            part = self._tracer.start_span(title, here, start_time=offset + round(start * 1e9))
            part.end(offset + round(end * 1e9))
