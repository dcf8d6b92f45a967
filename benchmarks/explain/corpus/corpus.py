"""Programs of the corpus: a slow way and a fast way to do the same work, and the finding that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]
PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """``make(fast)`` sets the program up and returns the work to time; ``kinds`` are findings that are right, none for
    a healthy program."""

    name: str
    kinds: tuple[str, ...]
    make: Callable[[bool], Work]
    library: str
    held_out: bool = False
    device: str = "cpu"
    steady: bool = False
    """True if only the time between its optimizer steps counts, not that of setting a trainer up."""


def program(
    *kinds: str, library: str = "torch", held_out: bool = False, device: str = "cpu", steady: bool = False
) -> Callable[[Callable[[bool], Work]], Work]:
    """Enter a program into the corpus."""

    def enter(make: Callable[[bool], Work]) -> Callable[[bool], Work]:
        PROGRAMS[make.__name__] = Program(make.__name__, kinds, make, library, held_out, device, steady)
        return make

    return enter  # type: ignore[return-value]
