"""Support of models by merged layers (``merged_layers.py``), and the stack that a run gives its model."""

from __future__ import annotations

import logging

from ...models.decoder import Decoder, Stack
from ...spec.model import ModelConfig
from .activations import Checkpointing, stack_with

log = logging.getLogger(__name__)


def refusal(config: ModelConfig) -> str | None:
    """Return the reason why the layers of such a model cannot be merged, in a sentence; None if they can."""
    if config.norm != "rmsnorm" or not config.gated_mlp or config.position != "rope":
        return "the model has other layers than RMSNorm, rotary attention and SwiGLU"
    if config.qk_norm_whole:
        return "its queries and keys are normalised over all heads together"
    if config.beyond_stacks:
        return f"it has {config.beyond_stacks[0]}"
    if config.o_bias or config.mlp_bias:
        return "its matrices have biases, and not of q, k and v alone"
    return None


def can_merge(model: Decoder) -> bool:
    """Return True if the layers of a model can be merged, on a GPU; log the reason if not."""
    if not model.norm.weight.is_cuda:
        return False
    refused = (weight.refuses_merging() for name, weight in model.weights() if name != "head")
    reason = refusal(model.config) or next(filter(None, refused), None)
    if reason:
        log.info("the layers run operator by operator: %s", reason)
    return not reason


def stack_of(model: Decoder, plan: Checkpointing, merged: bool, whole: int = 0) -> Stack:
    """Return the layers of a model under a plan, merged if requested and possible. ``whole`` as in ``MergedLayers``."""
    if not (merged and can_merge(model)):
        return stack_with(model, plan)
    from .merged_layers import MergedLayers

    return MergedLayers(model, plan, whole)
