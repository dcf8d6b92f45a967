"""Interfaces of the programs that benchmarks measure, this project among them; a file of this folder is one program.

A benchmark holds the work, the clock and the order of turns; a file of this folder holds one program's way to do the
work. Peers' packages are imported where a peer is made, so that a benchmark runs where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.compilers.operators import Arrays, Work

CONTEXT = 1024
"""Tokens of context that servers on a CPU are given for each sequence."""


class Engine(Protocol):
    """A program that generates, in this process."""

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Generate greedily, and return the seconds of the prefill and of ``new_tokens - 1`` tokens of all prompts."""
        ...


class LoadGenerator(Protocol):
    """A program that sends requests to a server."""

    def level(
        self, url: str, folder: Path, rate: float, requests: int, seed: int, *, prefixes: bool = False
    ) -> dict[str, Any]:
        """Send one level of load, and return its figures in the shape of ``transect bench serve``."""
        ...

    def close(self) -> None:
        """End it."""
        ...


TrainingStep = Callable[[], Any]
"""One training step of a model on the current device; returns the loss, still there."""


@dataclass(frozen=True, slots=True)
class Server:
    """A program that serves.

    Attributes:
        name: for tables.
        command: (model, threads, port) -> its command line.
    """

    name: str
    command: Callable[[str, int, int], list[str]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """One rung of ``compilers/ladder.py``, compiled, with its inputs in place.

    Attributes:
        call: starts the work on the copy of data with that number; returns the result, which may not be there yet.
        wait: blocks until all calls are done.
        read: converts a result to a float array of numpy's.
        copies: number of copies of data.
        note: a peculiarity of this compiler at this work, for the table; empty for none.
    """

    call: Callable[[int], Any]
    wait: Callable[[], None]
    read: Callable[[Any], np.ndarray]
    copies: int
    note: str = ""


class Compiler(Protocol):
    """A compiler or library of operators, in a process of its own; made with (device, threads, tuning trials)."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that matter."""
        ...

    def lacks(self, work: Work) -> str | None:
        """Return the reason why it is not asked for this work, as a sentence; None if it is."""
        ...

    def prepare(self, work: Work, weights: Arrays, data: list[Arrays]) -> Prepared:
        """Compile the work for these shapes, in this compiler's best setting."""
        ...
