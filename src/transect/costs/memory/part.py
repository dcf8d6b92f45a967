"""``RankPart``: the part of a model that one rank of a run has, and its ``Gradients``. A single rank has everything.

Bytes of the gradients of N numbers. e: bytes of a gradient; r: bytes of a number while ranks sum it
(``parallel/replicas.py``, ``parallel/sharded.py``); W: numbers that are sent together, a bucket of 25 MiB or one large
parameter; "own": numbers that this rank updates.

=====================  =========================================  ==============================================
                       during the backward pass                   at the optimizer's step
=====================  =========================================  ==============================================
one rank               e for each that exists                     e N; several micro-batches in 16 bits: 4 N
replicas, zero 0 or 1  r for each that was sent, e for the rest   r N
                       of W; e W more when the last is sent
zero 2                 as above, but of the sent ones r for each  r for each own
                       own and 2 W
zero 3                 4 for each own; e for one layer and the    4 for each own
                       units after the last layer; r for a layer
                       while it is summed
=====================  =========================================  ==============================================

With several micro-batches per rank and zero below 3, float32 sums (4 N) exist during all passes. If one rank keeps its
optimizer's states on the host, each gradient is copied there when it is complete, so the device holds those of one
layer and one in transit. With zero 3 a layer's own gradients are copied when they are summed; a single rank with zero 3
and its weights on the host copies a layer's gradients when the layer is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...spec.model import ModelConfig
from ...spec.weights import weight_shapes
from .sizes import BUCKET_BYTES

BUCKET_NUMBERS = BUCKET_BYTES // 4
"""Gradients that are sent together."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """The part of a model and of a step that one rank computes and holds.

    Attributes:
        config: sizes of the rank's own heads, feed-forward units and layers.
        shapes: the rank's part of every weight, by the name in its own model.
        last: the rank has the head and the loss.
        vocabulary: rows of the head that the rank computes.
        tensor: ranks that share each layer. sequence: they also share the tokens of norms and the residual stream.
        context: ranks that share the tokens of a sequence.
        in_flight: micro-batches whose activations wait for their backward pass at once, at most; where a rank has
            several runs of layers, a micro-batch in one of them is a part of one.
        data: ranks that compute other micro-batches. zero: level of ZeRO, over ``sharing`` ranks.
        reduce: bytes of a number while gradients are summed over these.
        shared: bytes that GPUs share to sum them in, which torch's allocator does not know.
        tiles: with zero 3, number of parts in which each matrix of a layer comes to the device, and its gradient
            leaves.
        owned: parameters whose state the rank holds, with zero 1 or 2; None if all.
        host_state: master weights and the state of the optimizer are in the memory of the host. host_weights: the
            rank's pieces of the weights too, with zero 3, also if ``sharing`` is 1.
    """

    config: ModelConfig
    shapes: Shapes
    last: bool = True
    vocabulary: int = 0
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    in_flight: float = 1
    data: int = 1
    zero: int = 0
    reduce: int = 4
    shared: int = 0
    tiles: int = 1
    owned: frozenset[str] | None = None
    host_state: bool = False
    host_weights: bool = False

    @classmethod
    def whole(cls, config: ModelConfig) -> RankPart:
        """Make the part of a run on one device: everything."""
        return cls(config=config, shapes=weight_shapes(config), vocabulary=config.vocab_size)

    @cached_property
    def layers(self) -> list[int]:
        """Numbers in each layer."""
        modules = by_module(self.shapes)
        return [sum(modules.get(f"layers.{layer}", {}).values()) for layer in range(self.config.n_layers)]

    @cached_property
    def outside(self) -> int:
        """Numbers outside the layers: embedding, last norm, head."""
        return count(self.shapes) - sum(self.layers)

    @cached_property
    def tile(self) -> int:
        """Numbers of the largest tile of a matrix of a layer, with ``tiles``."""
        matrices = [shape for n, shape in self.shapes.items() if n.startswith("layers.") and len(shape) == 2]
        return max(-(-rows // self.tiles) * columns for rows, columns in matrices)

    @property
    def sharing(self) -> int:
        """Ranks with the same weights: they sum gradients, and ``zero`` cuts over them."""
        return self.data * self.context

    @property
    def alone(self) -> bool:
        """True if the rank has whole gradients, of which no other rank has a part."""
        return self.sharing == 1 and self.zero != 3

    def pieces(self, numbers: int) -> int:
        """Return this rank's share of numbers that are divided evenly."""
        return -(-numbers // self.sharing)

    @cached_property
    def sharded(self) -> int:
        """Numbers of all its pieces, with zero 3."""
        return self.pieces(self.outside) + sum(map(self.pieces, self.layers))


@dataclass(frozen=True)
class Gradients:
    """Bytes of gradients on a rank, by the table above.

    Attributes:
        part: the rank.
        trained: shapes of its trained parameters.
        element: bytes of a number of a parameter.
        several: a step has more than one micro-batch.
    """

    part: RankPart
    trained: Shapes
    element: int
    several: bool

    @cached_property
    def numbers(self) -> int:
        """Trained numbers."""
        return count(self.trained)

    @cached_property
    def owned(self) -> int:
        """Numbers that this rank steps with."""
        if self.part.zero == 3:
            return self.part.sharded
        names = self.part.owned
        return self.numbers if names is None else count({n: s for n, s in self.trained.items() if n in names})

    @cached_property
    def bucket(self) -> int:
        """W: about the most numbers that are sent together."""
        return min(self.owned if self.part.zero == 2 else self.numbers, max(BUCKET_NUMBERS, self.largest))

    @cached_property
    def largest(self) -> int:
        """Numbers of the largest parameter."""
        return max(map(math.prod, self.trained.values()))

    @property
    def leave(self) -> bool:
        """True if gradients go to the host as they are made, or summed."""
        return self.part.host_state and (self.part.alone or self.part.zero == 3)

    @property
    def sums(self) -> int:
        """Sums of gradients in 16 bits that wait from one micro-batch to the next, beyond ``waiting``."""
        if self.leave:
            return 0
        return 4 * self.numbers if self.part.alone and self.several and self.element < 4 else 0

    @property
    def waiting(self) -> int:
        """Gradients held during the forward pass of the last micro-batch."""
        if not self.several or self.leave:
            return 0
        if self.part.alone:
            return self.sums or self.element * self.numbers
        return 4 * (self.owned if self.part.zero == 3 else self.numbers)

    @property
    def on_host(self) -> int:
        """Gradients in the host's memory that wait for the CPU's step, if states are on the host."""
        wide = self.several or self.part.sharing > 1
        return (4 if wide else self.element) * self.owned if self.part.host_state else 0

    def during(self, above: int, own: int, root: int = 0) -> int:
        """Count the gradients held while a layer runs backward: ``above`` numbers of later layers are done, ``root`` of
        them after the last layer, and ``own`` numbers are the layer's."""
        part, e = self.part, self.element
        if self.leave and part.alone:
            return e * (min(above, self.largest) + own)
        if part.alone:
            return self.waiting if self.several and e == 4 else e * (above + own) + self.sums
        if part.zero == 3 and part.tiles > 1:  # the gradient of a tile, and its sum on the way
            made = self.owned if self.several else part.pieces(above - root + max(part.layers))
            done = 0 if self.leave else 4 * made
            return done + e * (root + part.tile) + (part.reduce * part.tile if part.sharing > 1 else 0)
        if part.zero == 3 and part.sharing == 1:
            return e * (root + own + (max(part.layers) if above > root else 0))
        if part.zero == 3:
            done = self.owned if self.several else part.pieces(max(0, above - root))
            done = min(done, part.pieces(max(part.layers))) if self.leave else done
            under_way = part.reduce * max(part.layers) if above > root else 0
            return 4 * done + e * (root + own) + under_way
        unsent = min(above + own, BUCKET_NUMBERS)
        if self.several:
            return self.waiting + (e * unsent if e < 4 else 0)
        sent = above + own - unsent
        if part.zero == 2:
            sent = min(sent, int(sent * self.owned / self.numbers) + 2 * BUCKET_NUMBERS)
        return part.reduce * sent + e * unsent

    @property
    def at_the_end(self) -> int:
        """Gradients held when the backward pass ends and the last bucket is filled."""
        part, e = self.part, self.element
        if part.alone:
            return self.during(self.numbers, self.largest if self.leave else 0)
        if part.zero == 3 and part.sharing == 1:
            return e * (part.outside + (max(part.layers) if part.tiles == 1 else 0))
        if part.zero == 3:
            own = part.pieces(part.outside) if self.leave else self.owned
            return 4 * own + (e + part.reduce) * part.outside
        filled = (e + 4 * (self.several and e < 4)) * self.bucket
        sent = self.numbers if part.zero < 2 else min(self.numbers, self.owned + 2 * self.bucket)
        return part.reduce * sent + filled

    @property
    def stepping(self) -> int:
        """Gradients that the optimizer steps with."""
        part = self.part
        if self.leave:
            return 0
        if part.alone:
            return self.sums or self.element * self.numbers
        if part.zero == 3:
            return 4 * self.owned
        return part.reduce * (self.owned if part.zero == 2 else self.numbers)

    @property
    def why(self) -> str:
        """Explanation of these bytes."""
        part = self.part
        if self.leave:
            return f"{self.numbers} trained numbers of {self.element} bytes, each copied to the host when it is made"
        if part.alone:
            return f"{self.numbers} trained numbers of {self.element} bytes; all of them exist when the optimizer steps"
        if part.zero < 2:
            return f"{self.numbers} trained numbers of {part.reduce} bytes, summed over {part.sharing} ranks"
        each = 4 if part.zero == 3 else part.reduce
        return f"{self.owned} of {self.numbers} trained numbers, of {each} bytes, summed over {part.sharing} ranks"


def module_of(name: str) -> str:
    """Return ``layers.3`` for a parameter of that layer, else the name up to its first dot."""
    first, _, rest = name.partition(".")
    return f"layers.{rest.partition('.')[0]}" if first == "layers" else first


def by_module(shapes: Shapes) -> dict[str, dict[str, int]]:
    """Count the numbers of each parameter, by its layer or other module."""
    found: dict[str, dict[str, int]] = {}
    for name, shape in shapes.items():
        found.setdefault(module_of(name), {})[name] = math.prod(shape)
    return found


def count(shapes: Shapes) -> int:
    """Count the numbers in all shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
