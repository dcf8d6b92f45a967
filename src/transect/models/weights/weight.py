"""``Weight``: one matrix of a model in some number format. Stacks and loaders use matrices through this class.

A kind of weight must know two things: its product (``forward``) and the values it stands for (``dense``). The rest has
a default that works for every kind, or says in a sentence that this kind cannot. What makes a stack fast is an
*ability*: a method that returns what a stack calls, or None, which is the default. A stack asks once, when it is built,
and keeps plain callables; it never looks at a kind's type nor at its tensors.

=====================  ===================================================================  ==================
ability                what it returns                                                      who asks
=====================  ===================================================================  ==================
``product``            the product without a gradient, as a plain callable                  fused stack
``gated_product``      the same with ``silu(gate) * up`` after it                           fused stack
``stream_product``     products that begin and end at the residual stream                   fused stack
``join_with``          itself and others, concatenated along rows in one storage            ``Projection``
``packed``             the matrix in the layout of the C++ kernels                          CPU stack
``unadapted``          itself without the adapter beside it, and the adapter's factors      CPU stack
``training_part``      what it brings to a merged training product                          merged layers
``held``               the matrix itself, where it lies in memory as numbers                adapters on a CPU
``tie``                whether it can share an embedding's table                            ``Decoder``
``grouped``            the product of each row with the matrix of its expert                ``MoE``
``grouped_gate_up``    the same of gate and of another weight, up, with SwiGLU after both   ``MoE``
=====================  ===================================================================  ==================

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...costs.work import Cost, product_cost
from ...ops.lang.jit import runs_triton
from ...ops.moe import grouped_linear
from ...ops.opset import OpSet
from ...spec.numbers.layouts import MatrixLayout
from ...spec.numbers.number_format import NumberFormat, WeightFormat
from ..staging import Staging
from ..stored import Values
from .low_rank import LowRank

if TYPE_CHECKING:
    from ...ops.cpu.library import Library, PackedWeight
    from ...ops.linear.stream_products import ResidualStream, Size, StreamProducts
    from ...ops.sampling.sampling import LogitShards

Product = Callable[[Tensor], Tensor]
Chain = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], tuple[float, float]], tuple[Tensor, Tensor]]
"""``(x, residual, weights of the two norms, their eps) -> (q with k and v of the next layer, residual stream)``."""
Dimension = Literal["out", "in"]
Gated = Any
"""Output of a gate, the input of the next product: ``[T, F]``, or these rows in 8 bits (``Rounded``)."""


class StreamProduct(Protocol):
    """A weight's products on a residual stream, see ``ops/linear/stream_products.py``."""

    @property
    def biased(self) -> bool: ...

    @property
    def leaves(self) -> object:
        """Kind of the residual stream that the product leaves. Products with equal kinds can share a stream."""
        ...

    def takes(self, x: Tensor, sizes: Sequence[Size], wanted: int | None = None) -> bool:
        """Return True if a step on the stream x ``[T, D]`` with products of these sizes can run on it.

        ``wanted``: number of tokens that the last layer ends for; None if those are all.
        """
        ...

    def add(self, x: Gated, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream: ...

    def linear(self, stream: ResidualStream) -> Tensor: ...

    def plain(self, x: Gated) -> Tensor: ...

    def gated(self, stream: ResidualStream) -> Gated: ...

    def chain(self, after: Sequence[StreamProduct]) -> Chain | None:
        """Return this product on a stream and the three after it (gate with up, down, q with k and v of the next layer)
        in one launch for one row; None if there is no such kernel."""
        ...


@runtime_checkable
class Stackable(StreamProduct, Protocol):
    """Products on a stream by a matrix that may consist of parts of several kinds."""

    def stack(self, below: Sequence[StreamProduct | None]) -> StreamProduct | None:
        """Return the products of this matrix stacked on others; None if there is no such kernel."""
        ...


class Unsummed(NamedTuple):
    """A product without its all-reduce, which can be fused with the following residual add and norm."""

    product: Product
    sum: Product
    """All-reduce alone."""
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor] | None]
    """``(branch, residual, weight, eps) -> (RMSNorm of total, total)`` with total = residual + the sum of ``branch``;
    None if the fusion is not faster."""


class Ungathered(NamedTuple):
    """The product of a head that is sharded over ranks: this rank's logits, and the memory in which all ranks can read
    the others'."""

    product: Product
    spread: LogitShards


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank factors beside a matrix: ``scale * B A`` with a ``[rank, I]`` and b ``[O, rank]``."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float


@dataclass(frozen=True, slots=True)
class TrainingPart:
    """Contribution of a weight to a merged training product (``train/model/merged_products.py``)."""

    outputs: int
    inputs: int
    like: Tensor
    """A tensor with the dtype and device of the product."""
    fill: Callable[[Tensor], object]
    """Function that writes the matrix into ``[O, I]``, whose rows may be strided."""
    settle: Callable[[Tensor], object] | None = None
    """Function called when the matrix has moved into this memory for good; None if it is written again for each
    product."""
    parameter: nn.Parameter | None = None
    """The matrix as a parameter, trained or frozen, if it is one."""
    adapter: Adapter | None = None


class Seams(Protocol):
    """Start and end of the part of a layer that ranks share, in the forward and the backward pass. Each method takes a
    tensor ``[T or this rank's rows, D]`` that it may change, and returns one."""

    def enter(self, x: Tensor) -> Tensor:
        """Gather the rows of a norm's result from all ranks."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' products, or this rank's rows of it."""
        ...

    def leave_back(self, g: Tensor) -> Tensor:
        """Return the gradient of ``leave``."""
        ...

    def enter_back(self, g: Tensor) -> Tensor:
        """Return the gradient of ``enter``."""
        ...


class Weight(nn.Module):
    """A matrix ``[O, I]``, and the bias of its product: ``x [T, I] -> x W^T + bias [T, O]``.

    Subclasses call ``add_bias`` and define ``forward`` and ``dense``; the head of this file lists what else they may.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    batch_invariant: bool = False
    """On a CPU no row of the product depends on the others, if the operators are batch-invariant."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features

    def add_bias(
        self, bias: bool | Tensor | None, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Set the bias, in ``__init__`` after the kind's own tensors: an unfilled one, this one, or none."""
        if isinstance(bias, bool):
            bias = torch.empty(self.out_features, device=device, dtype=dtype) if bias else None
            self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        else:
            self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    # ---- what every kind must know -----------------------------------------------------------------------------------

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return the product, with its gradient if it has one."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the values that the weight represents, ``[O, I]``; with a gradient if the kind is trained."""
        raise NotImplementedError

    # ---- what every kind knows, or says why not ----------------------------------------------------------------------

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Weights that it consists of, in the order of their rows; by default itself."""
        return (self,)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        """Memory of the matrix; the bias is not counted."""
        tensors = [*self.parameters(), *self.buffers()]
        return sum(t.nbytes for t in tensors if t is not self.bias)

    @property
    def workspace(self) -> int:
        """Most bytes that its product takes beside input and output."""
        return 0

    @property
    def format(self) -> WeightFormat:
        """Number format, and the bits of a number."""
        return WeightFormat(type(self).__name__, 8 * self.nbytes / (self.out_features * self.in_features))

    def cost(self, tokens: int, *, activation: float = 16) -> Cost:
        """Count the product of ``tokens`` rows, their numbers of ``activation`` bits: matrix, input and output once
        each."""
        bias = 0 if self.bias is None else 8 * self.bias.element_size()
        return product_cost(
            tokens, [self.out_features], self.in_features, bits=self.format.bits, activation=activation, bias=bias
        )

    def shard(self, dim: Dimension, rank: int, n: int) -> Weight:
        """Return the part of rank ``rank`` of ``n``: of its outputs or its inputs, in memory of its own. With parts of
        the inputs the products of all ranks add up, so only rank 0 keeps the bias.

        Raises:
            ValueError: it cannot be cut there; the message says why.
        """
        raise ValueError(f"{type(self).__name__} [{self.out_features}, {self.in_features}] cannot be cut into shards")

    def load(self, values: Values, staging: Staging) -> None:
        """Copy the values of a file, of this shape.

        Raises:
            ValueError: this kind is not filled from files.
        """
        raise ValueError(f"{type(self).__name__} is not filled from files")

    def takes(self, layout: MatrixLayout) -> bool:
        """Return True if ``load`` accepts a checkpoint's packed matrix, ``Stored.codes``, and not only its values."""
        return False

    def draw(self, std: float, generator: torch.Generator | None = None) -> None:
        """Draw random values, normal with deviation ``std``."""
        like = self.training_part().like
        values = torch.empty(self.out_features, self.in_features, device=like.device, dtype=like.dtype)
        draw_normal(values, std, generator)
        self.load(values, Staging(like.device))

    def grouped(self, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        """Multiply each row by the matrix of its expert: the weight is the concatenation of equal matrices.

        ``ops/moe/grouped_linear.py`` has the shapes. By default the values of all experts are made.
        """
        call = grouped_linear.reference
        if runs_triton(x) and x.is_cuda:  # where nothing may be read on the host
            from ...ops.moe.triton import triton_grouped_linear as call
        return call(x, self.dense().to(x.dtype), starts, order, self.bias)

    def rows(self, index_T: Tensor) -> Tensor:
        """Return rows of the matrix, ``[T, I]``: an embedding look-up."""
        return self.dense()[index_T]

    # ---- abilities ---------------------------------------------------------------------------------------------------

    def product(self) -> Product:
        """Return the inference product, resolved once: its input may change, weights and bias may not."""
        return self.forward

    def gated_product(self) -> Product | None:
        """Return ``x [T, I] -> silu(first half of outputs) * second half [T, O / 2]``, resolved once for inference;
        None if there is none."""
        return None

    def stream_product(self, products: StreamProducts) -> StreamProduct | None:
        """Return the weight's products on the residual stream by ``products``; None if there are none."""
        return None

    def unsummed(self) -> Unsummed | None:
        """Return the product and its all-reduce as separate callables; None if they cannot be separated."""
        return None

    def ungathered(self) -> Ungathered | None:
        """Return the product of this rank's part of the vocabulary alone; None if this rank has the whole vocabulary,
        or cannot read the logits of other ranks."""
        return None

    def grouped_gate_up(self, up: Weight) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
        """Return the gate of experts: ``(x, starts, order) -> silu(gate) * up`` of each row's expert, in one
        operator."""
        return None

    def join(self) -> Weight | None:
        """Return itself as one matrix in one storage, None if that is impossible; for weights of several parts."""
        return self

    def unjoin(self) -> None:
        """Drop a joined storage: its parts are about to be moved."""

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> Weight | None:
        """Join this weight's rows with those of ``others``, which all become views of the result; None if they cannot
        be joined.

        ``gated``: it will be asked for its ``gated_product`` above all, and may lie in memory as suits that."""
        return None

    def packed(self, library: Library) -> PackedWeight:
        """Return the matrix and the bias as the C++ kernels take them. By default a copy of the dense values."""
        from dataclasses import replace

        from ...ops.cpu.packing import pack

        bias = None if self.bias is None else self.bias.detach().float().contiguous()
        return replace(pack(library, self.dense().detach().float()), bias=bias)

    def unadapted(self) -> tuple[Weight, LowRank | None]:
        """Return the matrix without its adapter, and the adapter's factors; itself and None if it has no adapter that
        can be separated."""
        return self, None

    def refuses_merging(self) -> str | None:
        """Return the reason why it cannot be part of a merged training product, as a sentence; None if it can."""
        return None

    def seams(self) -> Seams | None:
        """Return the communication of the ranks that share the layer that this matrix ends; None if no ranks share
        it."""
        return None

    def training_part(self) -> TrainingPart:
        """Contribute to a merged training product: by default the dense values, written for each product.

        Raises:
            ValueError: it has parameters that are to be trained and that such a product does not know.
        """
        own = [name for name, p in self.named_parameters() if p.requires_grad]
        if own:
            raise ValueError(
                f"{type(self).__name__} brings no gradient of {', '.join(own)} to merged layers: "
                "train with merged = false"
            )

        def fill(out: Tensor) -> None:
            out.copy_(self.dense().detach())

        floating = (t for t in [*self.parameters(), *self.buffers()] if t.is_floating_point())
        like: Any = next(floating, None)
        return TrainingPart(self.out_features, self.in_features, self.dense() if like is None else like, fill)

    def held(self) -> Tensor | None:
        """Return the dense matrix in memory, ``[O, I]``; None if there is none."""
        return None

    def tie(self, table: nn.Parameter) -> bool:
        """Use an embedding's table ``[O, I]`` as the matrix; False if this kind cannot, and holds a copy."""
        return False

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.format.name}"


class WeightKind(Protocol):
    """Makes a weight without values: a subclass of ``Weight``, or one with some arguments given."""

    def __call__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        ops: OpSet,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Weight: ...


@dataclass(frozen=True, slots=True)
class WeightSite:
    """Device and options of the products with a model's weights."""

    device: torch.device | str = "cpu"
    dependent: bool = False
    """True if launches begin before the previous kernel ends, if the device supports that."""
    chained: bool = False
    """``ops/linear/packed/gguf/gguf_row.cu`` and ``ops/linear/packed/gguf/gguf_chain.cu`` take one row of blocks of
    GGUF files."""
    batch_invariant: bool = False
    """A row's product must not depend on the number of rows, nor on the others."""


class Holder(Protocol):
    """A way to hold packed matrices in one place; each such kind of weight has one (``kinds.py``).

    It is made of a ``WeightSite`` alone. Products are resolved when the first weight is asked for.
    """

    def rounded(self, form: NumberFormat) -> WeightKind | None:
        """Return the kind of weights that are rounded to ``form`` when they are loaded; None for another kind's
        format."""
        ...

    def stored(self, layout: MatrixLayout) -> WeightKind | None:
        """Return the kind of weights that hold a checkpoint's matrices in this packing; None for another kind's
        layout."""
        ...


Kinds = Callable[[str], WeightKind]
"""Function from a matrix's name in the model, without the layer (``attention.q``, ``mlp.down``, ``head``), to its
kind."""


def by_expert(weight: Weight, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """Compute ``Weight.grouped`` without a gradient, from the values of each expert with rows; the bounds are read on
    the host.

    Raises:
        ValueError: the weight cannot be cut between experts.
    """
    experts = len(starts) - 1
    rows = x if order is None else x[order.long() // max(1, len(order) // max(1, len(x)))]
    out = rows.new_empty(len(rows), weight.out_features // experts)
    for e, (first, end) in enumerate(pairwise(starts.tolist())):
        if end > first:
            own = weight.shard("out", e, experts)
            out[first:end] = F.linear(rows[first:end], own.dense().to(x.dtype), own.bias)
    return out


def part_of(size: int, rank: int, n: int, step: int = 1, why: str = "") -> slice:
    """Return the ``rank``-th of ``n`` equal parts of ``size``, each a multiple of ``step``.

    Raises:
        ValueError: there are none; ``why`` says what ``step`` is.
    """
    if not 0 <= rank < n:
        raise ValueError(f"there is no rank {rank} of {n}")
    if size % (n * step):
        raise ValueError(f"{size} cannot be cut into {n} equal parts" + (f" of whole {why} of {step}" if why else ""))
    each = size // n
    return slice(rank * each, (rank + 1) * each)


def shard_bias(bias: nn.Parameter | None, dim: Dimension, part: slice, rank: int) -> Tensor | None:
    """Return the bias that goes with a shard."""
    if bias is None or (dim == "in" and rank):
        return None
    return bias.detach()[part].clone() if dim == "out" else bias.detach().clone()


def join_biases(parts: Sequence[Weight]) -> Tensor | None:
    """Concatenate the biases of weights, which become views of the result. Returns None if there are none. Either all
    weights have a bias or none has."""
    biases = [part.bias for part in parts if part.bias is not None]
    if not biases:
        return None
    joined = torch.cat([bias.detach() for bias in biases])
    for bias, view in zip(biases, joined.split([part.out_features for part in parts]), strict=True):
        bias.data = view
    return joined


@torch.no_grad()
def draw_normal(into: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill a tensor with normal numbers of deviation ``std``, drawn on the generator's device."""
    if generator is None or generator.device.type == into.device.type:
        into.normal_(0.0, std, generator=generator)
    else:
        drawn = torch.empty(into.shape, dtype=into.dtype, device=generator.device)
        into.copy_(drawn.normal_(0.0, std, generator=generator))
