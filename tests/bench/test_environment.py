"""What is kept beside a result."""

import sys

from transect.bench.environment import environment


def test_api_keys_are_not_kept(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "bench", "serve", "--api-key", "secret", "--api-key=other", "--seed", "1"])
    found = environment()
    assert found["command"] == "transect bench serve --api-key ... --api-key=... --seed 1"
    assert found["cores"] >= 1 and "torch" in found["packages"]
