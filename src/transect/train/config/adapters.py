"""Adapters, and the base under them."""

from __future__ import annotations

from dataclasses import dataclass

from .parse import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W x + (alpha / rank) B A x with W frozen.

    Attributes:
        targets: which matrices of a layer have one: any of q, k, v, o, gate, up, down.
        group: numbers that share a scale in the frozen 4-bit base of ``qlora``.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    group: int = 64

    def __post_init__(self) -> None:
        positive(self, "rank", "group")
        known = ("q", "k", "v", "o", "gate", "up", "down")
        strange = [name for name in self.targets if name not in known]
        if strange or not self.targets:
            raise ValueError(f"lora.targets must be some of {', '.join(known)}, not {', '.join(strange) or 'none'}")
