"""Bits of a number of a model, from which costs and memory are computed (no torch).

A ``Weight`` says its own ``WeightFormat``, and ``storage_of_model`` of ``engine/build.py`` makes the ``Storage`` of a
model in memory. ``storage_for`` makes that of a model to plan with, from the records of ``spec/numbers``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..spec.numbers.layouts import MatrixLayout
from ..spec.numbers.registry import rounding

Layouts = tuple[tuple[str, MatrixLayout], ...]
"""Packed layouts of a layer's matrices, as in most layers, by name in the layer (``attention.q``), and of the
``head``."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bits of one number, including block scales."""

    linear: float = 16
    """Bits of the matrices of the layers."""
    embed: float = 16
    """Bits of the embedding table."""
    head: float = 16
    """Bits of the output head as it is read; with tied embeddings of the embedding table, or of a copy packed
    differently."""
    norm: float = 16
    """Bits of norm weights and biases."""
    activation: float = 16
    kv: float = 16
    head_copied: bool = False
    """True if the embeddings are tied, but the head is a second copy in its own format."""
    matrices: tuple[tuple[str, float], ...] = ()
    """Bits of matrices of a layer that differ from ``linear``, by name in the layer (``mlp.down``)."""
    streamed: float = 0
    """Bytes of matrices that every step copies over the host link."""

    def of(self, name: str) -> float:
        """Return the bits of a number of the matrix ``name`` of a layer, such as ``attention.q``."""
        return dict(self.matrices).get(name, self.linear)


def storage_for(element: int, quantization: str | None = None, *, native: bool = False) -> Storage:
    """Return the storage of a model whose numbers have ``element`` bytes, those of its cache too.

    Args:
        quantization: of the layers' matrices, as in ``EngineConfig``.
        native: it runs on the C++ CPU kernels, which have a scale (and a zero, except in fp8) for each 32 numbers.
    """
    bits = linear = 8.0 * element
    form = rounding(quantization)
    if form is not None and form.rounding is not None:
        linear = form.bits
        if native and form.rounding.native_bits is not None:
            linear = form.rounding.native_bits
    return Storage(linear=linear, embed=bits, head=bits, norm=bits, activation=32 if native else bits, kv=bits)


def storage_held(storage: Storage, layouts: Layouts) -> Storage:
    """Return ``storage`` with matrices in the checkpoint's packing."""
    bits = {name: layout.bits for name, layout in layouts}
    head = bits.pop("head", None)
    if head is not None:
        storage = replace(storage, head=head, head_copied=True)
    return replace(storage, matrices=tuple(bits.items())) if bits else storage
