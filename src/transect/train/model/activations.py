"""Activation checkpointing: the choice of activations to keep for the backward pass; the others are recomputed.

Source: Chen et al. 2016, arXiv:1604.06174.

Each is a ``Decoder.stack``, which runs the same layers in the same order, so losses are the same to the bit.

* ``none``: everything that a gradient needs is kept.
* ``selective``: the inside of each MLP, the widest part of a layer, is computed again from the MLP's input.
* ``full``: only the input of each layer is kept, and the layer is computed again.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...models.context import AttentionContext
from ...models.decoder import Decoder, Layer, Stack

Checkpointing = Literal["none", "selective", "full"]


def stack_with(model: Decoder, checkpointing: Checkpointing) -> Stack:
    """Return the layers of ``model`` with this checkpointing, to be set as its ``stack``.

    Raises:
        ValueError: an unknown name.
    """
    if checkpointing == "none":
        return model.run_layers
    if checkpointing not in ("selective", "full"):
        raise ValueError(f"checkpointing must be none, selective or full, not {checkpointing!r}")

    layers = [layer for layer in model.layers if isinstance(layer, Layer)]

    def run(x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        for layer, rotation in zip(layers, model.rotations(positions_T), strict=True):
            if not torch.is_grad_enabled():
                x_TD = layer(x_TD, rotation, context)
            elif checkpointing == "full":
                x_TD = checkpoint(layer, x_TD, rotation, context, use_reentrant=False)
            else:
                x_TD = layer.add_attention(x_TD, rotation, context)
                x_TD = checkpoint(layer.add_mlp, x_TD, use_reentrant=False)
        return x_TD

    return run
