"""``Verdict``: the outcome of grading one program, and its text for the student."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...costs.units import seconds_text

NEAR = 1.5
"""Multiple of the shipped solution's time up to which the two count as equal: a busy machine makes such differences."""
FAR = 60.0
"""Percent of the floor below which there is advice."""


@dataclass(slots=True)
class Verdict:
    """The outcome. ``right`` decides the exit code; ``slow`` does not."""

    rung: str
    right: bool
    reason: str = ""
    """A teacher's sentence: why it is wrong, or why it is slow."""
    detail: str = ""
    """The numbers behind the reason."""
    stopped: bool = False
    """The program raised an error, which ``detail`` names."""
    call: str = ""
    """The call of the first unsolved case, if it is short."""
    slow: bool = False
    cheats: list[str] = field(default_factory=list)
    """The program's ways around the exercise; it is not right if there are any."""
    passed: list[str] = field(default_factory=list)
    """Names of cases that it solved."""
    seconds: float | None = None
    """Time of one call by the grader's clock; None where it is meaningless (Triton's interpreter)."""
    reference_seconds: float | None = None
    peer_seconds: float | None = None
    floor_seconds: float | None = None
    """The least time on this machine; None for bookkeeping."""
    bound: str = ""
    """``bytes`` or ``FLOPs``: the ceiling that decides the floor."""
    planned_floor: str = ""
    """The least time on a GPU of a data sheet."""
    count: float | None = None
    reference_count: float | None = None
    counted: str = ""
    kernels: list[dict[str, Any]] = field(default_factory=list)
    """Kernels compiled ahead of time: registers, spills, widths of accesses."""
    device: str = ""

    @property
    def percent(self) -> float | None:
        """Percent of the floor that was reached."""
        if self.seconds is None or not self.floor_seconds:
            return None
        return 100 * self.floor_seconds / self.seconds

    def lines(self) -> list[str]:
        """Return the text, a list of lines."""
        if self.cheats:
            return [f"not graded: the program {each}" for each in self.cheats]
        if not self.right:
            solved = f"solved: {'; '.join(self.passed)}" if self.passed else ""
            call = self.call and f"  the call: {self.call}"
            first = (f"not right yet: {self.reason}", self.detail and f"  {self.detail}")
            if self.stopped:
                first = (f"not right yet: it stops with an error: {self.detail}", f"  perhaps: {self.reason}")
            lines = (*first, call, solved)
            return [line for line in lines if line]
        found = [f"right: {'; '.join(self.passed)}"]
        if self.seconds is not None:
            text = f"time: {time_text(self.seconds)}"
            if self.percent is not None:
                text += (
                    f", {min(self.percent, 100):.1f}% of the floor of this machine ({time_text(self.floor_seconds)})"
                )
            found.append(text)
            others = [("the shipped solution", self.reference_seconds), ("torch", self.peer_seconds)]
            beside = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in others if seconds)
            found += [f"beside it: {beside}"] if beside else []
        if self.count and self.reference_count:
            share = self.count / self.reference_count
            found.append(f"work: {self.count:,} {self.counted}, {share:.2f} times the shipped solution's")
        if self.bound:
            found.append(f"bound by {self.bound}")
        found += [self.planned_floor] if self.planned_floor else []
        found += [_kernel(each) for each in self.kernels]
        if self.slow:
            found.append(f"slow: {self.reason}")
        elif advice := self.try_next():
            found.append(f"try next: {advice}")
        return found

    def try_next(self) -> str:
        """Say in a sentence where a right program is furthest from the floor; empty if nothing is known."""
        for each in self.kernels:
            if each.get("spilled_bytes"):
                return f"{each['kernel']} spills registers: a smaller tile keeps all values in them"
        if self.seconds and self.reference_seconds and self.seconds > NEAR * self.reference_seconds:
            share = self.reference_seconds / self.seconds
            return f"the shipped solution takes {share:.0%} of your time: compare the two"
        if self.percent is not None and self.percent < FAR:
            return {
                "bytes": "fewer passes over memory, wider loads, and more of them under way at a time",
                "FLOPs": "use each loaded number more often: a larger tile in registers, and vector instructions",
            }.get(self.bound, "")
        return ""


def time_text(seconds: float | None) -> str:
    """Format seconds with a suitable unit; ``?`` if they are not known."""
    return "?" if seconds is None else seconds_text(seconds)


def _kernel(made: dict[str, Any]) -> str:
    if "refused" in made:
        return f"compiled ahead of time: {made['refused']}"
    loads = ", ".join(f"{count} loads of {width} B" for width, count in made["loads"].items())
    spilled = f", {made['spilled_bytes']} B spilled" if made["spilled_bytes"] else ", nothing spilled"
    return f"{made['kernel']} for {made['target']}: {made['registers']} registers{spilled}; {loads}"
