"""Useful FLOPs of training, for MFU: those that the mathematics needs, without recomputation.

Source: Chowdhery et al. 2022, arXiv:2204.02311."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...costs.model import Row, step_cost
from ...costs.work import visible_pairs
from ...spec.model import ModelConfig


class TrainingFlops:
    """FLOPs of steps, forward and backward, from what a step really computed.

    The backward pass of a product is two products, one where the weight is frozen (adapters count as nothing); that of
    attention, which recomputes its scores, five products for two. The output head works on tokens with a label only,
    and a token sees its own document only.

    Args:
        config: of the model.
        frozen: the weights are not trained, adapters beside them are.
    """

    def __init__(self, config: ModelConfig, *, frozen: bool) -> None:
        one = step_cost(config, [Row(1, 1)], logit_rows=1)
        products = 2 if frozen else 3
        self._linear, self._head = products * one["linear"].flops, products * one["head"].flops
        self._pair = 3.5 * 4 * config.q_dim
        self._reaches = Counter(config.layer_reach(layer) for layer in range(config.n_layers))

    def __call__(self, lengths: Iterable[int], labels: int) -> float:
        """FLOPs of documents of so many tokens each, ``labels`` of whose tokens have a label."""
        counts = Counter(lengths)
        attended = sum(
            count * layers * visible_pairs(length, length, *reach)
            for length, count in counts.items()
            for reach, layers in self._reaches.items()
        )
        tokens = sum(length * count for length, count in counts.items())
        return tokens * self._linear + labels * self._head + attended * self._pair


def flops_per_token(config: ModelConfig, length: int, *, frozen: bool) -> float:
    """FLOPs of one token, with a label, in documents of ``length`` tokens, forward and backward."""
    return TrainingFlops(config, frozen=frozen)([length], length) / length
