"""Losses on the routers of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Strength of load balancing between experts, and of the penalty on router logits
    (``train/objectives/balance.py``).

    Attributes:
        balance: factor of the load-balancing loss; 0 for none.
        z_loss: factor of the z-loss; 0 for none.
    """

    balance: float = 0.001
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("balance", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"router.{name} must be 0 or greater, not {getattr(self, name)}")
