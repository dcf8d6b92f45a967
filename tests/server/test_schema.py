"""schemathesis: whatever the OpenAPI schema allows, or nearly allows, no answer is a 5xx and each is as documented."""

import pytest
import schemathesis
from effort import proving
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from transect.server.app import create_app
from transect.server.options import ServerOptions

ROUTES = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/score", "POST"),
    ("/v1/rerank", "POST"),
    ("/v1/decisions", "GET"),
    ("/v1/decisions/what-if", "POST"),
    ("/live", "GET"),
    ("/v1/requests/{request_id}/bill", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/health", "GET"),
    ("/version", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/load", "GET"),
    ("/tokenizer_info", "GET"),
    ("/reset_prefix_cache", "POST"),
    ("/v1/load_lora_adapter", "POST"),
    ("/v1/unload_lora_adapter", "POST"),
    ("/v1/feedback", "POST"),
    ("/v1/captures", "GET"),
    ("/v1/captures", "DELETE"),
    ("/v1/releases", "GET"),
    ("/v1/releases/{name}", "GET"),
    ("/v1/releases/{name}", "PUT"),
    ("/v1/releases/{name}", "DELETE"),
]
MANY = 30 if proving() else 6
WITH_BODY = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/embeddings", "POST"),
    ("/tokenize", "POST"),
]


@pytest.fixture(scope="module")
def schema(shared_engine):
    """The schema as the server itself shows it."""
    app = create_app(shared_engine, ServerOptions(model_names=("m",)))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def explore(schema, path, method, mode, examples):
    """Send generated requests to one operation."""
    operation = schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True)
    def run(case):
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # nearly every made-up name would be a 404 and end there
        checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
        # An answer that is streamed on request is no JSON, and the schema describes the JSON one.
        if isinstance(case.body, dict) and case.body.get("stream") is True:
            checks.pop()
        case.call_and_validate(checks=checks)

    run()


@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_requests_that_the_schema_allows(schema, path, method):
    explore(schema, path, method, GenerationMode.POSITIVE, MANY if (path, method) in WITH_BODY else 5)


@pytest.mark.parametrize(("path", "method"), WITH_BODY)
def test_requests_that_the_schema_forbids(schema, path, method):
    explore(schema, path, method, GenerationMode.NEGATIVE, MANY)


def test_every_route_is_explored(app):
    described = {(path, method.upper()) for path, item in app.openapi()["paths"].items() for method in item}
    assert described == {*ROUTES, ("/metrics", "GET")}
