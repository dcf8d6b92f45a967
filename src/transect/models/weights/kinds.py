"""Choice of a model's kinds of weight, by a setting or by its checkpoint's packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...costs.storage import Layouts
from ...ops.opset import OpSet
from ...spec.numbers.int4 import INT4
from ...spec.numbers.layouts import MatrixLayout
from ...spec.numbers.number_format import NumberFormat
from ...spec.numbers.registry import rounding
from .as_stored import AsStored
from .dense import Dense
from .weight import Holder, Kinds, Weight, WeightKind, WeightSite


def holders() -> tuple[Callable[[WeightSite], Holder], ...]:
    """Return all ways to hold packed matrices on a GPU and in plain torch; each names its own formats and layouts."""
    from .gguf_blocks import BlockHolder
    from .int4_serving import Int4Holder
    from .listed import ListedHolder
    from .scaled8 import Holder8

    return Int4Holder, Holder8, BlockHolder, ListedHolder


def _rounded_to_4(weight: Tensor) -> Tensor:
    from .int4_serving import rounded

    return rounded(weight)


ROUNDED: Mapping[NumberFormat, Callable[[Tensor], Tensor]] = {INT4: _rounded_to_4}
"""Functions from a matrix to its rounded values, for formats whose codes plain torch does not hold on a CPU."""


def rounded_values(quantization: str | None) -> Callable[[Tensor], Tensor] | None:
    """Return the function from a matrix to its rounded values; None if plain torch holds the codes, or nothing is
    rounded."""
    form = rounding(quantization)
    return None if form is None else ROUNDED.get(form)


def kinds_for(
    quantization: str | None,
    device: torch.device | str,
    *,
    dependent_launch: bool = False,
    layouts: Layouts = (),
    chained_blocks: bool = False,
    batch_invariant: bool = False,
) -> Kinds | None:
    """Return the kinds of weight of a model that plain torch or a GPU serves; None if all are dense.

    Args:
        quantization: as ``EngineConfig`` names it: the layers' matrices are rounded when they are loaded, and the head
            stays dense.
        dependent_launch, chained_blocks, batch_invariant: as in ``WeightSite``; the last only for layouts that are
            ``batch_invariant``.
        layouts: those of a checkpoint that packs its matrices. Without ``quantization`` the layers stay so.
    """
    form = rounding(quantization)
    if form is None and not layouts:
        return None
    site = WeightSite(device, dependent_launch, chained_blocks, batch_invariant)
    found = [holder(site) for holder in holders()]
    if form is not None:
        own = next(kind for kind in (holder.rounded(form) for holder in found) if kind is not None)
        return lambda name: Dense if name == "head" else own
    return _as_stored(dict(layouts), found, batch_invariant)


def _as_stored(layouts: Mapping[str, MatrixLayout], holders: list[Holder], batch_invariant: bool) -> Kinds:
    def make(
        layout: MatrixLayout | None,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        ops: OpSet,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Weight:
        """Build a weight for a matrix in this packing; None means plain numbers."""
        own: WeightKind = Dense
        if layout is not None and (layout.batch_invariant or not batch_invariant):
            own = next(kind for kind in (holder.stored(layout) for holder in holders) if kind is not None)
        return own(out_features, in_features, bias, ops=ops, device=device, dtype=dtype)

    def kind_of(name: str) -> WeightKind:
        if name == "head" and name not in layouts:
            return Dense
        return partial(AsStored, layout=layouts.get(name), make=make)

    return kind_of
