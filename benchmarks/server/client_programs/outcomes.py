"""Shared parts of this folder's programs: features to try, and a line of JSON for the outcome of each.

Each program runs in its client's own environment, where nothing of this project can be imported. Its arguments are the
server's address and the model's name.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

URL, MODEL = (sys.argv[1].rstrip("/"), sys.argv[2]) if len(sys.argv) > 2 else ("", "")
BASE = f"{URL}/v1"
HELLO = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Arguments of the tool that the programs offer."""

_features: list[tuple[str, Callable[[], object]]] = []


class Skip(Exception):
    """The feature cannot be tried here; the text says why."""


def feature(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a function that raises where the feature does not work; what it returns is said."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        _features.append((name, function))
        return function

    return register


def served(path: str) -> None:
    """Raise Skip if the server has no such route."""
    with urllib.request.urlopen(f"{URL}/openapi.json") as reply:
        if path not in json.load(reply)["paths"]:
            raise Skip(f"the server has no {path}")


def _sent(method: str, path: str, body: object, headers: dict[str, str]) -> Any:
    data = None if body is None else json.dumps(body).encode()
    everything = {"Content-Type": "application/json", **headers}
    return urllib.request.urlopen(urllib.request.Request(BASE + path, data, everything, method=method), timeout=120)


def call(method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
    """The answer of a route below ``/v1``. Raises HTTPError where it is refused."""
    with _sent(method, path, body, headers or {}) as reply:
        return json.load(reply)


def events(path: str, body: object, headers: dict[str, str] | None = None) -> list[Any]:
    """The events of a stream, which must end as streams of this API do."""
    with _sent("POST", path, body, headers or {}) as reply:
        lines = [line.decode().strip() for line in reply if line.startswith(b"data:")]
    check(lines and lines[-1] == "data: [DONE]", lines[-1:])
    return [json.loads(line.removeprefix("data:")) for line in lines[:-1]]


def check(condition: object, said: object = "") -> None:
    """Raise AssertionError with the found value, regardless of the interpreter's flags."""
    if not condition:
        raise AssertionError(str(said)[:300])


def check_weather(arguments: Any) -> None:
    """Raise AssertionError for arguments that do not match the schema ``WEATHER``."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    check(set(found) == {"city", "days"} and found["city"] in ("Oslo", "Rome") and 1 <= found["days"] <= 9, found)


def main() -> None:
    """Try every feature, each whatever became of the others."""
    for name, function in _features:
        began = time.monotonic()
        try:
            said, outcome = function(), "works"
        except Skip as error:
            said, outcome = error, "skipped"
        except Exception as error:
            traceback.print_exc()
            said, outcome = f"{type(error).__name__}: {error}", "fails"
        seconds = round(time.monotonic() - began, 2)
        result = {"feature": name, "outcome": outcome, "seconds": seconds, "said": str(said or "")[:300]}
        print(json.dumps(result), flush=True)
