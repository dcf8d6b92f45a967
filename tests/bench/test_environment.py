"""What is kept beside a result."""

import sys
from importlib import metadata

from transect.bench.environment import environment


def test_api_keys_are_not_kept(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "bench", "serve", "--api-key", "secret", "--api-key=other", "--seed", "1"])
    found = environment()
    assert found["command"] == "transect bench serve --api-key ... --api-key=... --seed 1"
    assert found["cores"] >= 1 and "torch" in found["packages"]


def test_runs_from_a_source_tree_that_is_not_installed(monkeypatch):
    """Without the package's metadata its version is left out; the commit says what ran."""

    def version(name):
        if name == "transect":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    found = environment()
    assert found["packages"] == {"torch": "1.0"} and found["commit"]
