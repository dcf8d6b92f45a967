r"""Progressive layer dropping (Zhang & He 2020, arXiv:2010.13369): fewer and fewer layers run as training proceeds.

Step t of T keeps layer l of L (both from 0) with probability p, and adds what it computes, f, that much larger:

    theta(t) = (1 - k) exp(-100 t / T) + k        p = 1 - l / L (1 - theta(t))        x <- x + f(x) / p

k is ``layer_keep``. The first layer always runs, later ones are dropped more often; on average a step of a long run
has 1 - (1 - k) / 2 of its layers. Which ones is a function of the seed and the step, so all micro-batches and ranks
drop the same, and a resumed run continues as it would have. A dropped layer gets no gradient.
Without gradients (evaluation, samples) all layers run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...models.context import AttentionContext
from ...models.decoder import Decoder, Stack

GAMMA = 100.0


def share_kept(step: int, steps: int, keep: float) -> float:
    """Return theta of a step: between 1 at the start and ``keep``."""
    return (1 - keep) * math.exp(-GAMMA * step / steps) + keep


def kept_layers(seed: int, step: int, steps: int, keep: float, layers: int) -> list[float]:
    """Return, for each layer, the probability p with which it was kept, or 0 if it is dropped."""
    theta = share_kept(step, steps, keep)
    found = []
    for layer in range(layers):
        p = 1 - layer / layers * (1 - theta)
        found.append(p if random.Random(f"{seed}/{step}/{layer}").random() < p else 0.0)
    return found


def dropping(model: Decoder, seed: int, keep: float, place: Callable[[], tuple[int, int]], *, recompute: bool) -> Stack:
    """Return the layers of ``model`` with dropping, to be set as its ``stack``.

    Args:
        place: the step under way, from 0, and the steps of the run.
        recompute: layers keep their input alone for the backward pass.
    """

    def run(x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        if not torch.is_grad_enabled():
            return model.run_layers(x_TD, positions_T, context)
        kept = kept_layers(seed, *place(), keep, len(model.layers))
        for layer, rotation, p in zip(model.layers, model.rotations(positions_T), kept, strict=True):
            if p == 0.0:
                continue
            if recompute:
                out_TD = checkpoint(layer, x_TD, rotation, context, use_reentrant=False)
            else:
                out_TD = layer(x_TD, rotation, context)
            x_TD = out_TD if p == 1.0 else x_TD + (out_TD - x_TD) / p
        wanted = context.wanted
        return x_TD if wanted is None else x_TD.index_select(0, wanted.tokens_R)

    return run
