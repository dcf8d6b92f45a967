"""Record the inputs of a model's matrices when it reads a text, for calibrated rounding.

The text goes through the model one layer after another, in float32. Before the next layer, the caller may
round this layer's matrices; later layers then get the inputs that the rounded ones produce, as in
serving (Frantar et al. 2022, arXiv:2210.17323).

Shapes: T tokens, I inputs of a matrix, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..models.context import VarlenContext
from ..models.decoder import Decoder, Layer
from ..models.moe import MoE
from ..models.weights.projection import Projection
from ..models.weights.weight import Weight


class Inputs:
    """Sums over the inputs of one matrix, or of each expert of a stack.

    Attributes:
        squares: float32 ``[E, I]``: the sum of their squares; E is 1 where there are no experts.
        products: float32 ``[E, I, I]``: the sum of ``x x^T``; None where only squares are kept.
        rows: number of rows, over all experts together.
    """

    def __init__(self, experts: int, inputs: int, products: bool) -> None:
        self.squares = torch.zeros(experts, inputs)
        self.products = torch.zeros(experts, inputs, inputs) if products else None
        self.rows = 0

    def add(self, x_TI: Tensor, expert: int = 0) -> None:
        """Add some rows."""
        x_TI = x_TI.detach().reshape(-1, x_TI.shape[-1]).float()
        self.rows += len(x_TI)
        self.squares[expert] += x_TI.square().sum(0)
        if self.products is not None:
            self.products[expert].addmm_(x_TI.T, x_TI)


LayerInputs = dict[str, Inputs]
"""Sums by the names of a layer's matrices: ``attention.q``, ``mlp.experts_down``."""


@torch.no_grad()
def layer_inputs(
    model: Decoder, texts: Sequence[Sequence[int]], *, products: bool
) -> Iterator[tuple[int, LayerInputs]]:
    """Yield each layer's number and the inputs of its matrices. With ``products`` a layer runs again before the next
    one is requested, which then receives the outputs of the present matrices.

    Args:
        model: on plain torch.
        texts: token ids; each text sees itself alone.
        products: keep ``x x^T`` beside the squares.

    Raises:
        ValueError: there is no text of two tokens or more, or the numbers in a layer are not finite.
    """
    texts = [list(text) for text in texts if len(text) > 1]
    if not texts:
        raise ValueError("nothing to calibrate with: the text has fewer than two tokens")
    # One text at a time: what a layer needs besides its input and output is that of one.
    contexts = [VarlenContext(torch.tensor([0, len(text)], dtype=torch.int32), model.ops) for text in texts]
    positions = [context.positions() for context in contexts]
    states = [model.begin(torch.tensor(text), own) for text, own in zip(texts, positions, strict=True)]
    rotations = [model.rotations(own) for own in positions]

    def run(layer: Layer) -> list[Tensor]:
        return [
            layer(x_TD, turns[number], context)
            for x_TD, turns, context in zip(states, rotations, contexts, strict=True)
        ]

    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        with watched(layer, products) as found:
            after = run(layer)
        if not all(bool(x_TD.isfinite().all()) for x_TD in after):
            raise ValueError(f"layer {number} makes infinite or NaN numbers of the text: it cannot be calibrated")
        yield number, found
        states = run(layer) if products else after  # its matrices may be rounded by now


@contextmanager
def watched(layer: nn.Module, products: bool) -> Iterator[LayerInputs]:
    """Collect the inputs of a layer's matrices while it runs. Matrices that share an input share the sums."""
    found: LayerInputs = {}
    undo: list[Callable[[], object]] = []
    for name, module in layer.named_modules():
        if isinstance(module, Weight) and not isinstance(module, Projection) and ".experts_" not in name:
            _watch(name, module, found, products, undo)
        elif isinstance(module, MoE):
            _watch_experts(name, module, found, products, undo)
    try:
        yield found
    finally:
        for each in undo:
            each()


FOLLOWS = {"k": "q", "v": "q", "up": "gate", "shared_up": "shared_gate"}
"""Matrices with the same input as another."""


def _watch(name: str, module: Weight, found: LayerInputs, products: bool, undo: list[Callable[[], object]]) -> None:
    owner, _, own = name.rpartition(".")
    first = found.get(f"{owner}.{FOLLOWS.get(own, '')}")
    if first is not None:
        found[name] = first
        return
    found[name] = Inputs(1, module.in_features, products)
    undo.append(module.register_forward_pre_hook(lambda _, given: found[name].add(given[0])).remove)


def _watch_experts(name: str, moe: MoE, found: LayerInputs, products: bool, undo: list[Callable[[], object]]) -> None:
    """Watch the inputs of experts, which are multiplied through ``grouped``, with rows sorted by expert."""
    plain = {which: getattr(moe, which).grouped for which in ("experts_gate", "experts_up", "experts_down")}

    def grouped(which: str, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        if which != "experts_up":  # it has gate's rows
            rows = x if order is None else x[order.long() // (len(order) // len(x))]
            for expert, (first, last) in enumerate(pairwise(starts.tolist())):
                if last > first:
                    found[f"{name}.{which}"].add(rows[first:last], expert)
        out: Tensor = plain[which](x, starts, order)
        return out

    for which in plain:
        weight = getattr(moe, which)
        found[f"{name}.{which}"] = Inputs(moe.moe.held, weight.in_features, products)
        weight.grouped = partial(grouped, which)
        undo.append(partial(weight.__dict__.pop, "grouped"))
    found[f"{name}.experts_up"] = found[f"{name}.experts_gate"]
    moe.experts_gate.grouped_gate_up = lambda up: None  # type: ignore[method-assign]
    undo.append(partial(moe.experts_gate.__dict__.pop, "grouped_gate_up"))


def importance(model: Decoder, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Compute the mean square of each column's input, by the names of matrices (``layers.0.attention.q``); of a stack
    of experts, over all of them together."""
    found = {}
    for number, inputs in layer_inputs(model, texts, products=False):
        for name, each in inputs.items():
            found[f"layers.{number}.{name}"] = each.squares.sum(0) / max(1, each.rows)
    return found
