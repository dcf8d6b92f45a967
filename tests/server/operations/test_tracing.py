"""Spans for OpenTelemetry: what they say, whose trace they are in, and that a collector gets them."""

import asyncio
import builtins
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from transect.server.app import create_app
from transect.server.operations.tracing import PROTOCOL, Tracing, exporter_for
from transect.server.options import ServerOptions

sdk = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exporter():
    return sdk.InMemorySpanExporter()


@pytest.fixture
def traced(app, exporter):
    """The app's spans, once they have been sent."""
    tracing = app.state.serving.tracing = Tracing(exporter, "fake-model")

    def spans():
        tracing.close()
        return exporter.get_finished_spans()

    return spans


def by_name(spans):
    return {span.name: span for span in spans}


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("stream", [False, True])
async def test_queue_prefill_and_decode_stand_below_the_request(client, traced, stream):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "top_p": 0.5, "stream": stream}
    await client.post("/v1/chat/completions", json=body, headers=HEADERS)
    found = by_name(traced())
    request = found.pop("llm_request")
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == PARENT
    assert request.attributes["gen_ai.request.model"] == "fake-model"
    assert request.attributes["gen_ai.request.max_tokens"] == 5 and request.attributes["gen_ai.request.top_p"] == 0.5
    prompt = len("[user]Hi[a]")
    assert request.attributes["gen_ai.usage.input_tokens"] == request.attributes["gen_ai.usage.prompt_tokens"] == prompt
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert request.attributes["gen_ai.latency.time_to_first_token"] == 3.0
    assert request.attributes["gen_ai.latency.time_in_model_decode"] == 4.0
    assert request.status.is_ok or request.status.is_unset
    assert {name: round(seconds(span), 3) for name, span in found.items()} == {"queue": 1, "prefill": 2, "decode": 4}
    assert {span.parent.span_id for span in found.values()} == {request.context.span_id}
    assert found["queue"].end_time == found["prefill"].start_time
    assert "Hi" not in {
        text for value in request.attributes.values() if isinstance(value, str) for text in value.split()
    }


async def test_each_prompt_has_a_span_and_requests_do_not_share_a_trace(client, traced):
    body = {"prompt": ["a", "b"], "max_tokens": 2}
    await asyncio.gather(
        client.post("/v1/completions", json=body, headers=HEADERS), client.post("/v1/completions", json=body)
    )
    requests = [span for span in traced() if span.name == "llm_request"]
    ids = [f"{span.context.trace_id:032x}" for span in requests]
    assert len(requests) == 4 and ids.count(TRACE) == 2
    assert len({span.attributes["gen_ai.request.id"] for span in requests}) == 4


@pytest.mark.parametrize(
    ("word", "said"), [("FULL", "requests wait already"), ("DIE", "it is gone"), ("NAN", "not finite")]
)
async def test_what_fails_is_an_error_of_its_span(client, traced, word, said):
    await client.post("/v1/completions", json={"prompt": word})
    request = by_name(traced())["llm_request"]
    assert not request.status.is_ok and said in request.status.description
    assert request.attributes["error.type"]


async def test_a_client_that_leaves_is_no_error(app, engine, traced):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "HANG"}))
        while not engine.running:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    request = by_name(traced())["llm_request"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert request.status.is_unset


async def test_a_collector_gets_them(engine):
    """OTLP as protobuf over HTTP, from the option to the collector."""
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, self.headers["Content-Type"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        options = ServerOptions(("m",), otlp_traces_endpoint=f"http://127.0.0.1:{server.server_port}")
        app = create_app(engine, options)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
            await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3}, headers=HEADERS)
        await asyncio.to_thread(app.state.serving.tracing.close)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, kind, body),) = bodies
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    (resource,) = collector.ExportTraceServiceRequest.FromString(body).resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == "transect"
    (scope,) = resource.scope_spans
    assert {span.name for span in scope.spans} == {"llm_request", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in scope.spans} == {TRACE}


@pytest.mark.parametrize(
    ("address", "protocol", "kind", "target"),
    [
        ("http://h:4318", None, "http", "http://h:4318/v1/traces"),
        ("http://h:4318/", None, "http", "http://h:4318/v1/traces"),
        ("https://h/otlp/v1/traces", None, "http", "https://h/otlp/v1/traces"),
        ("http://h:4317", None, "grpc", "h:4317"),
        ("grpc://h:99", None, "grpc", "h:99"),
        ("http://h:4317", "http/protobuf", "http", "http://h:4317/v1/traces"),
        ("http://h:4318", "grpc", "grpc", "h:4318"),
    ],
)
def test_the_protocol_follows_the_address_or_the_variable(monkeypatch, address, protocol, kind, target):
    if kind == "grpc":
        pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    monkeypatch.delenv(PROTOCOL, raising=False)
    if protocol is not None:
        monkeypatch.setenv(PROTOCOL, protocol)
    exporter = exporter_for(address)
    try:
        assert kind in type(exporter).__module__ and exporter._endpoint == target
    finally:
        exporter.shutdown()


@pytest.mark.parametrize("address", ["collector:4317", "http://", "ftp://h", "http://h:port", ""])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match="is not an address: give http://HOST:4318"):
        ServerOptions(("m",), otlp_traces_endpoint=address)


def test_a_protocol_that_is_none(monkeypatch):
    monkeypatch.setenv(PROTOCOL, "http/json")
    with pytest.raises(ValueError, match="must be grpc or http/protobuf"):
        exporter_for("http://h:4318")


def test_what_to_install_is_said(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'transect\[otel\]'"):
        ServerOptions(("m",), otlp_traces_endpoint="http://h:4318")
