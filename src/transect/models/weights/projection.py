"""``Projection``: named matrices that share an input, concatenated along their rows.

``qkv`` is q, k, v; ``gate_up`` is gate and up, or up alone. Its parts are children of the module that it belongs to, so
a part keeps its own name in files, in an optimizer and in a checkpoint (``layers.0.attention.q.weight``), and is
replaced there (``attention.q = Adapted(attention.q, ...)``). They may be of different kinds. Where they are of one kind
that can be joined, they lie in one storage and a stack multiplies by all of them at once. A projection of one matrix
(``o``, ``down``, ``head``) is that ``Weight`` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...spec.numbers.number_format import WeightFormat
from .weight import Product, Stackable, StreamProduct, Weight

if TYPE_CHECKING:
    from ...ops.linear.stream_products import StreamProducts


class Half(nn.Module):
    """One of the two blocks of a layer: a module whose weights are parts of projections. Code that replaces a weight
    replaces it in the projection too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Weight):
            for child in self._modules.values():
                if isinstance(child, Projection):
                    child.replace(name, value)


class Projection(Weight):
    """Some weights under their names, in this order. They are not its children, and it has no tensors of its own."""

    def __init__(self, **parts: Weight) -> None:
        nn.Module.__init__(self)
        self.names = tuple(parts)
        # In tuples, so that they do not become children.
        self._matrices = tuple(parts.values())
        self._joined: tuple[Weight, ...] = ()
        self._joined_from: tuple[Tensor, ...] = ()
        self._is_joined = False

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self._matrices

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        return all(each.batch_invariant for each in (*self._matrices, *self._joined))

    def replace(self, name: str, weight: Weight) -> None:
        """Replace the part ``name`` by another weight, if there is such a part."""
        if name in self.names:
            self._matrices = tuple(
                weight if own == name else part for own, part in zip(self.names, self._matrices, strict=True)
            )
            self.unjoin()

    @property
    def parts(self) -> dict[str, Weight]:
        """Its weights by name."""
        return dict(zip(self.names, self.matrices, strict=True))

    @property
    def sizes(self) -> list[int]:
        """Outputs of each part."""
        return [part.out_features for part in self.matrices]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self.matrices[0].in_features

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(self.sizes)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The concatenated biases of the parts; zeros where a part has none."""
        parts = self.matrices
        given = [part.bias for part in parts if part.bias is not None]
        if not given:
            return None
        return torch.cat([given[0].new_zeros(p.out_features) if p.bias is None else p.bias for p in parts])

    def apart(self, x_TI: Tensor) -> tuple[Tensor, ...]:
        """Compute each part's product separately, with its gradient."""
        return tuple(part(x_TI) for part in self.matrices)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Compute all products, concatenated ``[T, O]``, with their gradients."""
        products = self.apart(x_TI)
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.matrices])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.matrices)

    @property
    def workspace(self) -> int:
        whole = self.join()
        return max(part.workspace for part in (self.matrices if whole is None else (whole,)))

    @property
    def format(self) -> WeightFormat:
        names = dict.fromkeys(part.format.name for part in self.matrices)
        return WeightFormat(" and ".join(names), 8 * self.nbytes / (self.out_features * self.in_features))

    # ---- abilities: those of the joined weight, if there is one ----

    def join(self) -> Weight | None:
        """Lay the parts in one storage; None if their kind cannot. Called once, and again after parts or their
        parameters were replaced. At most these parts are held twice meanwhile."""
        parts = self.matrices
        if len(parts) == 1:
            return parts[0]
        tensors = tuple(t for part in parts for t in (*part.parameters(), *part.buffers()))
        known = len(tensors) == len(self._joined_from) and all(
            a is b for a, b in zip(tensors, self._joined_from, strict=True)
        )
        if not self._is_joined or not known:
            with torch.no_grad():
                made = parts[0].join_with(parts[1:], gated=self.names == ("gate", "up"))
            self._joined = () if made is None else (made,)
            self._joined_from = tuple(t for part in parts for t in (*part.parameters(), *part.buffers()))
            self._is_joined = True
        return self._joined[0] if self._joined else None

    @property
    def joined(self) -> tuple[Weight, ...]:
        """Weight whose views the parts are, if they have been joined."""
        return self._joined

    def unjoin(self) -> None:
        """Drop the joined storage: the parts are about to be moved."""
        self._joined, self._joined_from, self._is_joined = (), (), False

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Any:
        """Move the parts, or change their type, and join them again if they were joined."""
        joined = self._is_joined
        super()._apply(fn, recurse)
        if joined:
            self.unjoin()
            self.join()
        return self

    def product(self) -> Product:
        whole = self.join()
        if whole is not None:
            return whole.product()
        products = self.products()
        return lambda x: torch.cat([product(x) for product in products], -1)

    def products(self) -> list[Product]:
        """Resolve each part's inference product."""
        return [part.product() for part in self.matrices]

    def gated_product(self) -> Product | None:
        whole = self.join()
        return None if whole is None or len(self.names) != 2 else whole.gated_product()

    def stream_product(self, products: StreamProducts) -> StreamProduct | None:
        whole = self.join()
        if whole is not None:
            return whole.stream_product(products)
        first, *below = (part.stream_product(products) for part in self.matrices)
        return first.stack(below) if isinstance(first, Stackable) and "gate" not in self.names else None

    def extra_repr(self) -> str:
        return ", ".join(self.names)
