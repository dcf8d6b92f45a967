r"""Matrices that share an input as one product, forward and backward; with low-rank adapters inside the same product.

Plain, for matrices W1, W2, ... over each other in W:

    y = x W^T         dx = g W         dW = g^T x

With adapters (``adapters/lora.py``), W is frozen, A are the A's over each other and B the B's along the diagonal:

    z = s x A^T       y = [x z] [W B]^T          dz = s g B       dx = [g dz] [W; A]       dA = dz^T x       dB = g^T z

In this form the adapters are a few more columns of one matrix

    E = [ W  B ]   [N + R, K + R]     R: the ranks of all adapters together, rounded up
        [ A  0 ]

and the large products, forward and backward, also do the additions of the adapters: y and dx are not read and written
again for them. For this, x and g lie in matrices with R spare columns, which hold z and dz.

A frozen base that is packed, as in 4 bits (``adapters/qlora.py``), has no W to keep: E is rebuilt for each product,
in memory that all share. Each kind of weight defines its part of a product (``Weight.training_part``).

Shapes: T tokens, I inputs, O outputs of all matrices, R spare columns (0 without adapters).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ...costs.memory.sizes import ADAPTER_COLUMNS
from ...models.weights.weight import TrainingPart, Weight
from ...ops.lang.jit import multiprocessors
from ...ops.linear.many_rows import matmul
from ...ops.linear.many_rows.tiling import cublas_is_quicker


class Scratch:
    """Memory for the matrices of 4-bit products, one at a time. It grows to the largest."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def matrix(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return ``[rows, columns]``, not filled; invalidates the matrix returned before."""
        if self._memory is None or self._memory.numel() < rows * columns:
            self._memory = None
            self._memory = torch.empty(rows * columns, dtype=like.dtype, device=like.device)
        return self._memory[: rows * columns].view(rows, columns)


def product(weight: Weight, scratch: Scratch) -> MergedProduct:
    """Build the product of a projection."""
    parts = [matrix.training_part() for matrix in weight.matrices]
    whole = weight.join() if all(part.parameter is not None for part in parts) else None
    if whole is None:
        weight.unjoin()
        return AdaptedProduct(parts, scratch)
    return MergedProduct(parts, whole.dense().detach())


class MergedProduct:
    """Plain matrices, in one storage: their parameters are views of it."""

    spare = 0

    def __init__(self, parts: Sequence[TrainingPart], joined: Tensor) -> None:
        self.parameters: list[nn.Parameter] = [part.parameter for part in parts if part.parameter is not None]
        self.sizes = [part.outputs for part in parts]
        self.inputs, self.outputs = parts[0].inputs, sum(self.sizes)
        self.weight = joined
        self.trained = any(parameter.requires_grad for parameter in self.parameters)

    def refresh(self) -> None:
        """Update the adapters' values; to be called before a forward pass."""

    def room(self, rows: int, columns: int) -> Tensor:
        """Allocate ``[rows, columns + R]``, not filled."""
        return self.weight.new_empty((rows, columns + self.spare))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply x ``[T, I + R]`` -> y ``[T, O + R]``; also return z ``[T, R]``, to be kept for ``gradients``."""
        return multiply(x, self.weight), None

    def prepare(self, g: Tensor) -> None:
        """Fill the spare columns of g ``[T, O + R]``; before the two methods below."""

    def gradient(self, g: Tensor) -> Tensor:
        """Compute dx ``[T, I]`` from g ``[T, O + R]``."""
        return matmul.matmul(g, self.weight.T)

    def gradients(self, g: Tensor, x: Tensor, z: Tensor | None) -> list[Tensor | None]:
        """Compute gradients of the parameters from g ``[T, O + R]``, x ``[T, I]`` and the z of ``forward``."""
        if not self.trained:
            return [None] * len(self.parameters)
        return list(weight_gradient(g, x).split(self.sizes))


def multiply(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply x ``[T, I]`` by weight ``[O, I]`` -> x weight^T ``[T, O]``, by cuBLAS if that is faster."""
    if cublas_is_quicker(x, weight):
        return torch.mm(x, weight.T, out=out)
    return matmul.matmul(x, weight, out=out)


def weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """Compute g^T x ``[O, I]`` from g ``[T, O]`` and x ``[T, I]``.

    By cuBLAS, which splits T, where tiles of 128 x 256 would leave the last round of multiprocessors mostly idle (H200,
    3072 x 2048 from 8192 tokens: 192 tiles on 132 multiprocessors, 166 us against 136).
    """
    rounds = -(-g.shape[1] // 128) * -(-x.shape[1] // 256) / multiprocessors(g.device)
    if g.is_cuda and rounds / math.ceil(rounds) < 0.8:
        return g.T @ x
    return matmul.matmul(g.T, x.T)


class AdaptedProduct(MergedProduct):
    """Frozen matrices of any kind, some or all with adapters."""

    def __init__(self, parts: Sequence[TrainingPart], scratch: Scratch) -> None:
        self.parts = parts
        self.sizes = [part.outputs for part in parts]
        self.inputs, self.outputs = parts[0].inputs, sum(self.sizes)
        self.trained = False
        self.scratch = scratch
        if any(part.parameter is not None and part.parameter.requires_grad for part in parts):
            raise ValueError(
                "a matrix that is trained shares its input with others that are not of its kind, and merged layers "
                "have no gradient for that: train with merged = false"
            )
        given = [part.adapter for part in parts if part.adapter is not None]
        self.scales = [adapter.scale for adapter in given]
        self.scale = self.scales[0] if given else 1.0
        self.adapters: list[tuple[slice, slice]] = []  # rows of y, and spare columns, of each
        self.parameters = []
        at = 0
        for part, start in zip(parts, itertools.accumulate([0, *self.sizes[:-1]]), strict=True):
            if part.adapter is not None:
                rank = part.adapter.a.shape[0]
                self.adapters.append((slice(start, start + part.outputs), slice(at, at + rank)))
                self.parameters += [part.adapter.a, part.adapter.b]
                at += rank
        self.spare = -(-at // ADAPTER_COLUMNS) * ADAPTER_COLUMNS
        self.low: Tensor | None = None  # all A's; the parameters become views
        self.example = parts[0].like
        self.relative: Tensor | None = None  # scale of each spare column over the first, where they differ
        if len(set(self.scales)) > 1:
            self.relative = self.example.new_ones(self.spare)
            for scale, (_, columns) in zip(self.scales, self.adapters, strict=True):
                self.relative[columns] = scale / self.scale
        if self.adapters:
            self.low = self.example.new_zeros((self.spare, self.inputs))
            for a, (_, columns) in zip(self.parameters[::2], self.adapters, strict=True):
                self.low[columns].copy_(a.detach())
                a.data = self.low[columns]
        self.whole: Tensor | None = None
        if all(part.settle is not None for part in parts):
            self.whole = self._allocate()
            self._fill(self.whole)
            for part, place in self._places(self.whole):
                assert part.settle is not None
                part.settle(place)

    def _allocate(self) -> Tensor:
        return self.example.new_empty((self.outputs + self.spare, self.inputs + self.spare))

    def _places(self, whole: Tensor) -> Iterator[tuple[TrainingPart, Tensor]]:
        """Yield each part, with its view of E."""
        return zip(self.parts, whole[: self.outputs, : self.inputs].split(self.sizes), strict=True)

    def _fill(self, whole: Tensor) -> None:
        """Copy W into E."""
        for part, place in self._places(whole):
            part.fill(place)
        whole[:, self.inputs :].zero_()

    def _adapt(self, whole: Tensor) -> None:
        """Copy A and B into E."""
        if self.low is not None:
            whole[self.outputs :, : self.inputs].copy_(self.low)
        for b, (rows, columns) in zip(self.parameters[1::2], self.adapters, strict=True):
            whole[rows, self.inputs + columns.start : self.inputs + columns.stop].copy_(b.detach())

    def _matrix(self) -> Tensor:
        """Return E, rebuilt if it is not kept."""
        if self.whole is not None:
            return self.whole
        whole = self.scratch.matrix(self.outputs + self.spare, self.inputs + self.spare, self.example)
        self._fill(whole)
        self._adapt(whole)
        return whole

    def refresh(self) -> None:
        if self.whole is not None:
            self._adapt(self.whole)

    def room(self, rows: int, columns: int) -> Tensor:
        return self.example.new_empty((rows, columns + self.spare))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        whole = self._matrix()
        z = None
        if self.spare:
            x_TI = x[:, : self.inputs]
            z = x.new_empty((x.shape[0], self.spare))
            torch.addmm(z, x_TI, whole[self.outputs :, : self.inputs].T, beta=0, alpha=self.scale, out=z)
            if self.relative is not None:
                z.mul_(self.relative)
            x[:, self.inputs :].copy_(z)
        y = self.room(x.shape[0], self.outputs)
        multiply(x, whole[: self.outputs], out=y[:, : self.outputs])
        return y, z

    def _high(self) -> Tensor:
        """Return all B's as blocks along the diagonal, ``[O, R]``: the upper right corner of E."""
        if self.whole is not None:
            return self.whole[: self.outputs, self.inputs :]
        high = self.example.new_zeros((self.outputs, self.spare))
        for b, (rows, columns) in zip(self.parameters[1::2], self.adapters, strict=True):
            high[rows, columns] = b.detach()
        return high

    def prepare(self, g: Tensor) -> None:
        if not self.spare:
            return
        dz = g[:, self.outputs :]  # zeros where no adapter has a column, as in B
        torch.addmm(dz, g[:, : self.outputs], self._high(), beta=0, alpha=self.scale, out=dz)
        if self.relative is not None:
            dz.mul_(self.relative)

    def gradient(self, g: Tensor) -> Tensor:
        return matmul.matmul(g, self._matrix()[:, : self.inputs].T)

    def gradients(self, g: Tensor, x: Tensor, z: Tensor | None) -> list[Tensor | None]:
        if z is None:
            return []
        da, db = g[:, self.outputs :].T @ x, g[:, : self.outputs].T @ z  # of all, of which db's diagonal is wanted
        made: list[Tensor | None] = []
        for rows, columns in self.adapters:
            made += [da[columns], db[rows, columns].contiguous()]
        return made
