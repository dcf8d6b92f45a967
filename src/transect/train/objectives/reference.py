"""The model at the start of a run: the reference of KL divergences and preferences.

No second model is held. What is trained is copied once, and changes places with the copy for a forward pass: with
adapters that is the adapters alone, and those of a new run are nothing, so the base answers by itself. With all weights
trained it is a frozen copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..model.build import Trainable


class Reference:
    """Keeps the trained parameters of ``trainable`` as they are now, on its device and in its dtype."""

    def __init__(self, trainable: Trainable) -> None:
        self._trainable = trainable
        self._kept = {name: p.detach().clone() for name, p in trainable.parameters.items()}

    @property
    def nbytes(self) -> int:
        """Memory of the copy."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the model the reference inside the context; afterwards it is restored with identical bits.

        Nothing inside may keep a graph or change a parameter.
        """
        model = self._trainable.model
        stack, model.stack = model.stack, model.run_layers  # layer by layer: nothing is remembered of other weights
        self._swap()
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap()
            model.stack = stack

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._trainable.parameters.items():
            now = parameter.detach().clone()
            parameter.copy_(self._kept[name])
            self._kept[name].copy_(now)
