"""What is kept beside a result."""

import importlib.util
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import transect
from transect.bench.environment import environment


@pytest.fixture
def record():
    """benchmarks/record.py, which is no package."""
    path = Path(__file__).parents[2] / "benchmarks" / "record.py"
    spec = importlib.util.spec_from_file_location("benchmarks_record", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_version_is_recorded_and_is_the_latest_release(record):
    """The changelog, the package and its metadata agree, and a new result is not marked as old."""
    assert environment()["version"] == transect.__version__ == record.release()
    project = tomllib.loads((record.ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == transect.__version__


def test_results_from_before_the_latest_release_are_marked(record, monkeypatch):
    monkeypatch.setattr(record, "release", lambda: "0.10.0")
    old, older, new = (
        {"commit": "b", "version": "0.9.1"},
        {"commit": "a"},
        {"commit": "c", "version": "0.10.0"},
    )
    assert record.made_at([new, new]) == "commit c"
    assert record.made_at([older, old]) == "commit a, b (measured before 0.10.0)"
    assert record.made_at([old, new]) == "commit c; commit b (measured before 0.10.0)"
