"""Useful FLOPs of training, for MFU: those that the mathematics needs, without recomputation.

Source: Chowdhery et al. 2022, arXiv:2204.02311."""

from __future__ import annotations

from ..models.config import ModelConfig
from ..models.cost import Row, step_cost


def flops_per_token(config: ModelConfig, length: int, *, frozen: bool) -> float:
    """FLOPs of one token in documents of ``length`` tokens, forward and backward.

    The backward pass of a product is two products, one where the weight is ``frozen`` (adapters count as nothing); that
    of attention, which recomputes its scores, five products for two.
    """
    costs = step_cost(config, [Row(length, length)], logit_rows=length)
    products = costs["linear"].flops + costs["head"].flops
    return ((2 if frozen else 3) * products + 3.5 * costs["paged_attention"].flops) / length
