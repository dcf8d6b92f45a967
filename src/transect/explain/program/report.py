"""``Explanation``: the result for a program, as lines of text and as JSON. ``report_html.py`` makes a page of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ...costs.ceilings import Ceilings
from .finding import Finding
from .gaps import Named
from .split import PARTS, OpStat, Split
from .steady import Steps

MOST_OPS = 12
SURE = 1.1
"""Factor by which a floor must exceed an operator's time before the operator counts as faster than its floor."""
CACHED = "operators above 100% of their floor found their inputs in a cache: floors count them from memory"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Result: the parts of the wall time, the findings, and the material they are based on."""

    split: Split
    findings: list[Finding]
    named: list[Named] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    interrupted: bool = False
    """True if Ctrl-C ended the explained program."""
    steps: Steps | None = None
    """Explained steps; None if none repeat."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; seconds."""
        return as_dict(self)

    def __str__(self) -> str:
        return "\n".join(lines(self))


def lines(explanation: Explanation) -> Iterator[str]:
    """Yield lines for parts, findings, and the most expensive operators."""
    split = explanation.split
    if explanation.steps is not None:
        yield str(explanation.steps)
    device = "GPU" if split.on_gpu else "CPU"
    yield f"wall time {1e3 * split.wall:.1f} ms profiled, {1e3 * split.own:.1f} ms {split.source}, {device}"
    yield ""
    for part, meaning in PARTS.items():
        seconds = split.parts.get(part, 0.0)
        if seconds > 0 or part == "unexplained":
            yield f"  {100 * split.share(part):5.1f}%  {1e3 * seconds:10.2f} ms  {meaning}"
    yield f"  100.0%  {1e3 * sum(split.parts.values()):10.2f} ms"
    yield ""
    if not explanation.findings:
        yield "findings: none that would gain 2% or more"
    for number, found in enumerate(explanation.findings, 1):
        yield f"{number}. {found.title}: {1e3 * found.gain:.1f} ms to gain ({found.share:.0%})"
        yield f"   evidence: {found.evidence}"
        if found.where:
            yield f"   where: {found.where}"
        yield f"   do: {found.advice}" + (f"   [--apply does: {_changes(found)}]" if found.apply else "")
    top = heaviest(explanation)
    if top:
        yield ""
        yield "   time ms   calls   of floor  operator"
        for op in top:
            yield f"{1e3 * op.seconds:10.2f} {op.calls:7d}  {of_floor(op):>9}  {op.title} {op.key.shapes or ''}"[:160]
    for child in explanation.facts.get("children", ()):
        yield f"child process {child['pid']} ({child['name']}): {child['busy']:.0%} of a core"
    for note in notes(explanation):
        yield f"note: {note}"


def _changes(found: Finding) -> str:
    """Return the names of a finding's changes, with the share of those that gain less."""
    less = {name: found.share * gain / found.gain for name, gain in found.gains.items() if gain < 0.9 * found.gain}
    names = found.apply.split(", ")
    return ", ".join(f"{name} (at most {less[name]:.0%})" if name in less else name for name in names)


def of_floor(op: OpStat) -> str:
    """Return the floor of an operator as a share of its time; empty if it has none."""
    return "" if op.floor is None or not op.seconds else f"{min(9.99, op.calls * op.floor / op.seconds):.0%}"


def notes(explanation: Explanation) -> list[str]:
    """Return remarks on the figures."""
    faster = any(op.floor and op.calls * op.floor > SURE * op.seconds for op in heaviest(explanation))
    return [*explanation.split.notes, *([CACHED] if faster else [])]


def heaviest(explanation: Explanation) -> list[OpStat]:
    """Return the operators or kernels that take the most time."""
    return sorted(explanation.split.ops, key=lambda op: -op.seconds)[:MOST_OPS]


def as_dict(explanation: Explanation) -> dict[str, Any]:
    """Return the figures for JSON; seconds."""
    split = explanation.split
    return {
        "wall_s": split.wall,
        "plain_s": split.own,
        "plain_measured": split.measured,
        "steps": None if explanation.steps is None else asdict(explanation.steps),
        "on_gpu": split.on_gpu,
        "parts_s": {part: split.parts.get(part, 0.0) for part in PARTS},
        "findings": [asdict(found) for found in explanation.findings],
        "operators": [
            {
                "name": op.key.name,
                "shapes": op.key.shapes,
                "calls": op.calls,
                "seconds": op.seconds,
                "floor_s": None if op.floor is None else op.calls * op.floor,
            }
            for op in sorted(split.ops, key=lambda op: -op.seconds)[:100]
        ],
        "facts": explanation.facts,
        "notes": notes(explanation),
    }
