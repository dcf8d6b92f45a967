"""Bits of a number of a model, from which costs and memory are computed (no torch).

A ``Weight`` says its own ``WeightFormat``, and ``storage_of_model`` of ``engine/build.py`` makes the ``Storage`` of a
model in memory. ``storage_for`` makes that of a model to plan with, from the records of ``spec/numbers``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..spec.numbers.layouts import MatrixLayout
from ..spec.numbers.registry import rounding

Layouts = tuple[tuple[str, MatrixLayout], ...]
"""The layout of each matrix of a layer that most layers have packed, by its name there (``attention.q``), and of the
``head``."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bits that one number takes, block scales included."""

    linear: float = 16
    """The matrices of the layers."""
    embed: float = 16
    """The embedding table."""
    head: float = 16
    """The output head, as it is read; with tied embeddings the embedding table, or a copy packed differently."""
    norm: float = 16
    """Norm weights and biases."""
    activation: float = 16
    kv: float = 16
    head_copied: bool = False
    """Tied embeddings, but the head is held a second time in its own format."""
    matrices: tuple[tuple[str, float], ...] = ()
    """Matrices of a layer that are not held as ``linear`` says, by their names in it (``mlp.down``)."""
    streamed: float = 0
    """Bytes of matrices that every step brings over the host link, because they live elsewhere."""

    def of(self, name: str) -> float:
        """Bits of a number of the matrix ``name`` of a layer, such as ``attention.q``."""
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
    """``storage`` where matrices stay as the checkpoint packs them."""
    bits = {name: layout.bits for name, layout in layouts}
    head = bits.pop("head", None)
    if head is not None:
        storage = replace(storage, head=head, head_copied=True)
    return replace(storage, matrices=tuple(bits.items())) if bits else storage
