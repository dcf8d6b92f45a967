"""Detection of a failed run, with the facts that a person needs: the step, the batch, the tensor."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ...models.decoder import Decoder

WINDOW = 10
"""Number of losses that are kept."""
LEVEL = 5
"""Last losses whose median is the normal loss: few, so that it follows the fall of the loss at a run's start."""
LEAST = 3
"""Number of losses before a spike can be detected."""
RISE = 2.0
"""Smallest rise in nats above the normal loss that counts as a spike; see also ``SPREADS``."""
SPREADS = 8
"""Smallest rise of a spike, as a multiple of the median rise between losses. Falls do not count: training causes
them."""


class TrainingStopped(RuntimeError):
    """Raised when a run cannot sensibly continue. The last checkpoint is older; the message has the observations."""


class LossWatch:
    """Remembers the last losses and notices one that is far above them.

    A batch may simply be harder than others. A batch that was calm a moment ago tells the two causes apart: if its loss
    is unchanged, the model is well.
    """

    def __init__(self, losses: list[float] | None = None) -> None:
        self.losses: deque[float] = deque(losses or [], maxlen=WINDOW)

    @property
    def usual(self) -> float:
        """Median of the last losses."""
        return statistics.median(list(self.losses)[-LEVEL:])

    def stands_out(self, loss: float) -> bool:
        """Return True if ``loss`` is far above the last ones; remember it if not."""
        if len(self.losses) >= LEAST:
            rises = [after - before for before, after in itertools.pairwise(self.losses) if after > before]
            if loss > self.usual + max(RISE, SPREADS * statistics.median(rises or [0.0])):
                return True
        self.losses.append(loss)
        return False

    @staticmethod
    def has_jumped(before: float, now: float) -> bool:
        """Return True if a calm batch's loss rose from ``before`` to ``now`` so far that the model has gone wrong."""
        return not now < before + RISE


@torch.no_grad()
def first_bad_number(
    order: Mapping[str, int], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> tuple[int, str] | None:
    """Find the first of one rank's weights, or else of its gradients, that is not finite; None if all are.

    Args:
        order: the place of each parameter in the run's model.

    Returns:
        Its name, after a number that is smaller the earlier a step would come to it.
    """
    for name, weight in weights.items():
        if not bool(weight.isfinite().all()):
            return order[name] - len(order), f"the weight {name}"
    for name in sorted(gradients, key=order.__getitem__, reverse=True):  # the backward pass goes from the head down
        if not bool(gradients[name].isfinite().all()):
            return len(order) - order[name], f"the gradient of {name}"
    return None


@torch.no_grad()
def first_bad_tensor(model: Decoder, loss: Callable[[], Tensor], gradients: Mapping[str, Tensor]) -> str:
    """Find where NaN or infinity first appears: a weight, else the output of a module, else a gradient.

    ``loss()`` runs the forward pass of the batch again; every module is watched meanwhile.
    """
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            return f"the weight {name}"
    found: list[str] = []

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            values = output if isinstance(output, tuple) else (output,)
            if not found and not all(bool(v.isfinite().all()) for v in values if isinstance(v, Tensor)):
                found.append(name)

        return modules[name].register_forward_hook(look)

    modules = {name: module for name, module in model.named_modules() if name and not list(module.children())}
    handles = [watch(name) for name in modules]
    stack, model.stack = model.stack, model.run_layers  # module by module, whatever runs them otherwise
    try:
        value = loss()
    finally:
        model.stack = stack
        for handle in handles:
            handle.remove()
    if found:
        return f"the output of {found[0]}"
    if not bool(value.isfinite()):
        return "the loss itself (the hidden states are finite, the logits overflow)"
    for name, gradient in reversed(list(gradients.items())):  # the backward pass goes from the head down
        if not bool(gradient.isfinite().all()):
            return f"the gradient of {name}"
    return "no tensor that still exists"
