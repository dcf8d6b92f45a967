"""``MoEConfig``: the experts of a model, and their choice for each token (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Experts that replace the MLP of a layer; ``ValueError`` for unsupported combinations. Sizes are counts of
    elements.

    A router scores all experts for each token, in float32; the token goes to the best few, and their outputs are
    summed with the router's weights (``ops/moe/gating.py``). Shared experts see every token.
    """

    experts: int
    per_token: int
    """Experts per token."""
    expert_dim: int
    """Width of one expert."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """True if the weights of a token's experts are scaled to the sum ``scale``."""
    scale: float = 1.0
    score_bias: bool = False
    """True if a correction of each expert's score affects the choice alone (DeepSeek-V3)."""
    router_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    """Number of the best of ``groups`` whose experts are candidates."""
    shared_dim: int = 0
    """Width of the shared experts together; 0 for none."""
    shared_gate: bool = False
    """True if the shared experts have a sigmoid weight of their own (Qwen2-MoE)."""
    weighs_inputs: bool = False
    """True if the router's weights multiply the inputs of experts, not their outputs (Llama 4)."""
    bias: bool = False
    """True if experts have biases."""
    clamp: float | None = None
    """Clamp of the activation ``(up + 1) gate sigmoid(1.702 gate)``: gate is at most this, and up between it and its
    negative (gpt-oss)."""
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
        """Number of experts whose matrices this rank's layer has."""
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
