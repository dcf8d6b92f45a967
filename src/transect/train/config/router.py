"""Losses on the routers of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How strongly experts are kept equally busy, and router logits small (``train/objectives/balance.py``).

    Attributes:
        balance: factor of the load-balancing loss; 0: none.
        z_loss: factor of the z-loss; 0: none.
    """

    balance: float = 0.001
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("balance", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"router.{name} must be 0 or greater, not {getattr(self, name)}")
