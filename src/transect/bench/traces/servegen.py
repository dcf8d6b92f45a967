"""Clients of alibaba/ServeGen: a folder with ``chunk-N-trace.csv`` and ``chunk-N-dataset.json`` for each client.

A line of the first is a window of time: its start in seconds, requests per second, the coefficient of variation of the
gaps, the name of their distribution (Gamma or Weibull) and its shape and scale; windows without requests have no name.
The second has, by the second at which they begin to hold, the shares of lengths: ``"{104: 0.1, 313: 0.9}"``.

The files have distributions, not requests. ``read_servegen`` draws the requests of one window from a seed.
"""

from __future__ import annotations

import ast
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .asked import Asked, from_start

WINDOW_S = 600


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals of a client from ``start`` on, in seconds; gaps are distributed as ``name`` with ``shape``."""

    start: int
    rate: float
    name: str
    shape: float

    def gap(self, rng: random.Random) -> float:
        """Draw the seconds to the next request, 1 / ``rate`` on average."""
        if self.name == "Gamma":
            return rng.gammavariate(self.shape, 1 / (self.shape * self.rate))
        return rng.weibullvariate(1 / (self.rate * math.gamma(1 + 1 / self.shape)), self.shape)


def read_servegen(folder: Path, *, start: float | None = None, seed: int | str = 0) -> list[Asked]:
    """Draw the requests of the window that holds second ``start``; by default of the one with the most requests.

    Raises:
        ValueError: the folder has no clients, or this window has no requests.
    """
    clients = {file.name.split("-")[1]: list(_windows(file)) for file in sorted(folder.glob("chunk-*-trace.csv"))}
    rates: dict[int, float] = {}
    for windows in clients.values():
        for window in windows:
            rates[window.start] = rates.get(window.start, 0.0) + window.rate
    if not rates:
        raise ValueError(f"{folder} has no chunk-N-trace.csv with requests: give a folder of ServeGen's data")
    chosen = max(rates, key=lambda each: rates[each]) if start is None else int(start // WINDOW_S * WINDOW_S)
    found: list[Asked] = []
    for name, windows in clients.items():
        for window in windows:
            if window.start == chosen:
                found.extend(_requests(window, folder / f"chunk-{name}-dataset.json", name, seed))
    return from_start(found, f"{folder}, second {chosen},")


def _windows(file: Path) -> Iterator[Window]:
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            start, rate, _, name, shape, _ = line.split(",")
            if name in ("Gamma", "Weibull") and float(rate) > 0:
                yield Window(int(float(start)), float(rate), name, float(shape))
        except ValueError:
            raise ValueError(f"{file}, line {number}: a window has six columns, as in ServeGen's data") from None


def _requests(window: Window, dataset: Path, client: str, seed: int | str) -> Iterator[Asked]:
    rng = random.Random(f"servegen {seed} {client}")
    lengths = _lengths(dataset, window.start)
    if lengths is None:
        return
    prompts, outputs = lengths
    at = window.start + rng.random() * window.gap(rng)
    while at < window.start + WINDOW_S:
        prompt, output = (rng.choices(values, shares)[0] for values, shares in (prompts, outputs))
        yield Asked(at, max(1, prompt), max(1, output), client=client)
        at += window.gap(rng)


def _lengths(dataset: Path, start: int) -> tuple[tuple[list[int], list[float]], ...] | None:
    """Find the shares of prompt and output lengths that hold at ``start``; None if the file has none."""
    try:
        parts = json.loads(dataset.read_text())
        at = max((int(each) for each in parts if int(each) <= start), default=None)
        if at is None:
            return None
        found = [ast.literal_eval(parts[str(at)][name]) for name in ("input_tokens", "output_tokens")]
        if not all(found):
            return None
        return tuple((list(each), list(each.values())) for each in found)
    except (OSError, KeyError, ValueError, SyntaxError, TypeError) as error:
        raise ValueError(f"{dataset} has no lengths as in ServeGen's data ({error})") from None
