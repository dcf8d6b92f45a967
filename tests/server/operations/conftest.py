"""A server of two replicas, for the tests of this folder."""

import pytest
from stub_server import StubServer
from tiny_llm import save_tiny_llm


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """Two replicas behind keys, with engines that make tokens up."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    keys = folder / "keys.jsonl"
    keys.write_text('{"key": "key-of-alice", "name": "alice"}\n{"key": "key-of-bob", "name": "bob"}\n')
    found = StubServer(
        folder, "--api-key-file", str(keys), "--admin-api-key", "key-of-admin", "--data-parallel-size", "2"
    )
    yield found
    found.stop()
