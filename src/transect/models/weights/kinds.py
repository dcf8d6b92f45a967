"""Which kinds of weight a model has: as a setting names them, or as its checkpoint packs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from ...ops.linear.packed.gguf import gguf_matmul
from ...ops.opset import OpSet
from ..storage import Layout, Layouts
from .as_stored import AsStored
from .dense import Dense
from .gguf_blocks import GGUFBlocks
from .int4_serving import Int4Products, ServingInt4
from .scaled8 import EIGHT_BITS, Products8, Scaled8, kinds_of_8_bits
from .weight import Kinds, Weight, WeightKind


def kinds_for(
    quantization: str | None,
    device: torch.device | str,
    *,
    dependent_launch: bool = False,
    layouts: Layouts = (),
    chained_blocks: bool = False,
) -> Kinds | None:
    """The kinds of weight of a model that plain torch or a GPU serves; None: all are dense.

    Args:
        quantization: as ``EngineConfig`` names it: the layers' matrices are rounded when they are loaded, and the head
            stays dense.
        dependent_launch: as ``dependent`` in ``Int4Products.on``.
        layouts: without ``quantization``: of a checkpoint that packs its matrices: those of the layers stay so.
        chained_blocks: as ``chained`` of ``gguf_matmul.Products``.
    """
    if quantization in EIGHT_BITS:
        eight = Products8.on(device, dependent=dependent_launch, fp8=quantization == "fp8")
        return kinds_of_8_bits(quantization, eight)
    if quantization is not None:
        products = Int4Products.on(device, dependent=dependent_launch)
        int4: WeightKind = partial(ServingInt4, products=products)
        return lambda name: Dense if name == "head" else int4
    if not layouts:
        return None
    make_blocks = partial(gguf_matmul.Products, device, dependent=dependent_launch, chained=chained_blocks)
    return _as_stored(dict(layouts), device, dependent_launch, make_blocks)


def _as_stored(
    layouts: Mapping[str, Layout],
    here: torch.device | str,
    dependent: bool,
    make_blocks: Callable[[], gguf_matmul.Products],
) -> Kinds:
    formats = {layout.format for layout in layouts.values()}
    blocks: gguf_matmul.Products | None = None
    four = Int4Products.on(here, dependent=dependent) if "int4" in formats else None
    eight = Products8.on(here, dependent=dependent, fp8="fp8" in formats) if formats & set(EIGHT_BITS) else None

    def make(
        layout: Layout | None,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        ops: OpSet,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Weight:
        """A weight that holds what a checkpoint packs so; None: plain numbers."""
        nonlocal four, eight, blocks
        own: WeightKind = Dense
        if layout is not None and layout.format == "int4":
            four = four or Int4Products.on(device or "cpu", dependent=dependent)
            own = partial(ServingInt4, products=four, group=layout.group, ordered=layout.ordered)
        elif layout is not None and layout.format == "gguf":
            blocks = blocks or make_blocks()
            own = partial(GGUFBlocks, block_type=layout.block_type, products=blocks)
        elif layout is not None:
            eight = eight or Products8.on(device or "cpu", dependent=dependent, fp8="fp8" in formats)
            own = partial(Scaled8, fp8=layout.format == "fp8", blocks=layout.blocks, products=eight,
                          rounds_inputs=layout.rounds_inputs)  # fmt: skip
        return own(out_features, in_features, bias, ops=ops, device=device, dtype=dtype)

    return lambda name: (
        Dense if name == "head" and name not in layouts else partial(AsStored, layout=layouts.get(name), make=make)
    )
