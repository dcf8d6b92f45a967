"""How a run is spread over several devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .parse import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Data parallelism: each rank computes some micro-batches of a step, and all take the step of their sum.

    Attributes:
        data: ranks, each with a device of its own. A step is the same, to rounding, for any number of them: they share
            its ``accumulate`` micro-batches.
        zero: what is cut over the ranks: 0 nothing; 1 the optimizer's state; 2 gradients too; 3 weights too, which are
            gathered layer by layer. Each needs less memory and sends more.
        reduce: what gradients are summed in: ``float32`` or ``bfloat16``.
    """

    data: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    reduce: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        positive(self, "data")
        if self.zero and self.data == 1:
            raise ValueError(f"parallel.zero = {self.zero} cuts over several ranks: set parallel.data to 2 or more")
