"""``MoEConfig``: the experts of a model, and how tokens are sent to them (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Experts in place of the MLP of a layer; ``ValueError`` for what cannot run. Sizes are counts of elements.

    A router scores all experts for each token, in float32; the token goes to the best few, and their outputs are
    summed with the router's weights (``ops/moe/gating.py``). Shared experts see every token.
    """

    experts: int
    per_token: int
    """Experts that a token goes to."""
    expert_dim: int
    """Width of one expert."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """The weights of a token's experts add up to ``scale``."""
    scale: float = 1.0
    score_bias: bool = False
    """A correction of each expert's score that counts for the choice alone (DeepSeek-V3)."""
    router_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    """Only experts of the best ``groups_kept`` of ``groups`` are candidates."""
    shared_dim: int = 0
    """Width of the shared experts together; 0: none."""
    shared_gate: bool = False
    """The shared experts count with a sigmoid weight of their own (Qwen2-MoE)."""
    weighs_inputs: bool = False
    """The router's weights multiply what goes into an expert, not what comes out (Llama 4)."""
    bias: bool = False
    """Experts have biases."""
    clamp: float | None = None
    """``(up + 1) gate sigmoid(1.702 gate)`` with gate at most this, and up between it and its negative (gpt-oss)."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP."""
    ranks: int = 1
    """Number of ranks that share the experts: a layer has the matrices of its rank's experts, and the whole router."""

    @property
    def gated_at_once(self) -> bool:
        """True if one operator computes gate and up (``ops/moe/grouped_gate_up.py``), for dense weights."""
        return self.clamp is None and not self.bias

    @property
    def held(self) -> int:
        """Experts whose matrices a layer here has."""
        return self.experts // self.ranks

    def __post_init__(self) -> None:
        for name in ("experts", "per_token", "expert_dim", "groups", "groups_kept"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"{name} of a mixture of experts must be a whole number greater than 0, not {value!r}")
        if self.experts > 4096:
            raise ValueError(f"a layer has at most 4096 experts, not {self.experts}")
        if self.per_token > self.experts:
            raise ValueError(f"a token cannot go to {self.per_token} of {self.experts} experts")
        if self.experts % self.groups or self.groups_kept > self.groups:
            raise ValueError(
                f"{self.experts} experts cannot be {self.groups} equal groups of which {self.groups_kept} are kept"
            )
        if self.per_token > self.experts // self.groups * self.groups_kept:
            raise ValueError(f"{self.groups_kept} groups have fewer experts than the {self.per_token} of a token")
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"router score {self.score!r} is not supported; supported are: softmax, sigmoid")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"the scale of routing weights must be greater than 0, not {self.scale}")
        if self.shared_dim < 0 or (self.shared_gate and not self.shared_dim):
            raise ValueError("shared experts need a width greater than 0")
        if self.clamp is not None and not 0 < self.clamp < math.inf:
            raise ValueError(f"the clamp of an expert's activation must be greater than 0, not {self.clamp}")
