"""Parts of an account of memory: named terms with their bytes and the reason for each, and phases that hold some of
them at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that are held for one purpose; ``why`` is a sentence with the arithmetic."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A moment, and the bytes held then by the name of their term (0 for a missing one)."""

    name: str
    held: dict[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of all terms of this moment together."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True)
class Estimate:
    """The account of one way to run.

    Attributes:
        terms: each purpose once, with the most it ever holds.
        phases: in the order in which they come; the peak is the largest of them, not the sum of the terms.
        margin: bytes beyond the peak that a device must have: pages of the allocator that are partly used.
        host: bytes that the rank holds in host memory instead of on its device.
    """

    terms: tuple[Term, ...]
    phases: tuple[Phase, ...]
    margin: Term
    host: tuple[Term, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes held at the worst moment: ``torch.cuda.max_memory_allocated`` of a run, and the memory that GPUs share
        beside that."""
        return self.worst.bytes

    @property
    def worst(self) -> Phase:
        """The phase of the peak."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def needed(self) -> int:
        """Memory that must be free before the start: the peak and the margin."""
        return self.peak + self.margin.bytes

    def fits(self, budget: int) -> bool:
        """Return True if ``budget`` bytes of free memory are enough."""
        return self.needed <= budget

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON; bytes throughout."""
        return {
            "peak": self.peak,
            "margin": self.margin.bytes,
            "needed": self.needed,
            "terms": [{"name": t.name, "bytes": t.bytes, "why": t.why} for t in self.terms],
            "host": [{"name": t.name, "bytes": t.bytes, "why": t.why} for t in self.host],
            "phases": [{"name": p.name, "bytes": p.bytes, "held": dict(p.held)} for p in self.phases],
        }
