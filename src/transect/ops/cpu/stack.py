"""``LayerStack``: all decoder layers in one C++ call (``stack.h``), with their experts and adapters.

A C struct is filled from the Python object whose attributes have the names of its fields (``_filled``).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .library import CPacked, Library, PackedWeight, batch_arguments, check_cache

PRODUCTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""Products of a layer that an adapter may add to, and their parts, in the order of ``low_rank.h``."""
PARTS = 3


class _StackConfig(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "block_size")),
        *((name, c_int32) for name in ("layer_norm", "gated", "activation", "rotary_half", "kv", "bfloat16")),
        *((name, c_float) for name in ("norm_eps", "scale")),
        *((name, c_void_p) for name in ("norm", "norm_bias")),
        ("qk_norm_whole", c_int32),
    )


class _Experts(Structure):
    _fields_ = (
        *((n, c_int32) for n in ("count", "used", "sigmoid", "renormalize", "groups", "groups_kept")),
        ("scale", c_float),
        ("clamp", c_float),
        ("score_bias", c_void_p),
        *((n, POINTER(CPacked)) for n in ("router", "gate", "up", "down")),
        *((n, POINTER(CPacked)) for n in ("shared_router", "shared_gate", "shared_up", "shared_down")),
    )


class _Layer(Structure):
    _fields_ = (
        *((n, c_void_p) for n in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")),
        *((n, c_void_p) for n in ("q_norm", "k_norm")),
        *((n, POINTER(CPacked)) for n in ("q", "k", "v", "o", "gate", "up", "down")),
        ("window", c_int64),
        *((n, c_void_p) for n in ("k_scale", "v_scale")),
        ("experts", POINTER(_Experts)),
        ("sinks", c_void_p),
    )


class _LowRank(Structure):
    _fields_ = (("a", CPacked), ("scale", c_void_p), ("b", CPacked * PARTS), ("first", c_int32 * PARTS))


@dataclass(frozen=True, slots=True)
class StackExperts:
    """The experts of one decoder layer. The numbers are those of ``spec.moe.MoEConfig``.

    ``gate``, ``up`` ``[count * width, dim]`` and ``down`` ``[count * dim, width]`` are the matrices of all experts,
    concatenated along rows; widths and dim are multiples of ``library.GROUP_ROWS``.
    """

    count: int
    used: int
    sigmoid: bool
    renormalize: bool
    groups: int
    groups_kept: int
    scale: float
    clamp: float
    """Clamp of the activation; 0 for SwiGLU."""
    score_bias: Tensor | None
    """float32 ``[count]``, or None."""
    router: PackedWeight
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    shared_router: PackedWeight | None = None
    shared_gate: PackedWeight | None = None
    shared_up: PackedWeight | None = None
    shared_down: PackedWeight | None = None


@dataclass(frozen=True, slots=True)
class StackLayer:
    """The weights of one decoder layer; norms are float32 vectors, ``gate`` is None for a plain MLP. ``experts``
    replace gate, up and down."""

    attention_norm: Tensor
    attention_norm_bias: Tensor | None
    mlp_norm: Tensor
    mlp_norm_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    q: PackedWeight
    k: PackedWeight
    v: PackedWeight
    o: PackedWeight
    gate: PackedWeight | None
    up: PackedWeight | None
    down: PackedWeight | None
    window: int
    """Sliding window in tokens; 0 for none."""
    k_scale: Tensor | None = None
    """Divisors of keys before they are cached, float32 for each key head; None for no division."""
    v_scale: Tensor | None = None
    experts: StackExperts | None = None
    sinks: Tensor | None = None
    """Scores of attention sinks, float32 for each query head; None for none."""


def _filled(struct: type[Structure], values: object, kept: list[Structure]) -> Any:
    """Fill a C struct from the attributes of ``values`` with the names of its fields. Structs that it points to are
    appended to ``kept``, which must live as long as it does."""
    fields: dict[str, Any] = {}
    for name, *_ in struct._fields_:
        value = getattr(values, name)
        if isinstance(value, PackedWeight | StackExperts):
            kept.append(value.c_struct() if isinstance(value, PackedWeight) else _filled(_Experts, value, kept))
            value = ctypes.pointer(kept[-1])
        fields[name] = _address(value) if isinstance(value, Tensor) else value
    return struct(**fields)


def _address(vector: Tensor) -> int:
    """Return the address of a float32 vector for the C++ side."""
    if vector.dtype != torch.float32 or not vector.is_contiguous():
        raise ValueError("norm weights and scales must be contiguous float32")
    return vector.data_ptr()


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """An adapter's factors for the parts of one product: ``a`` ``[sum of ranks, inputs]``, float32 ``scale`` for each
    of its rows, and each part's ``b`` ``[outputs, rank]``, None for a part without an adapter."""

    a: PackedWeight
    scale: Tensor
    b: tuple[PackedWeight | None, ...]

    @property
    def nbytes(self) -> int:
        """Memory of the factors."""
        return self.a.data.numel() + sum(each.data.numel() for each in self.b if each is not None)

    def c_struct(self) -> _LowRank:
        made, first = _LowRank(a=self.a.c_struct(), scale=self.scale.data_ptr()), 0
        for part, own in enumerate(self.b):
            if own is not None:
                made.b[part], made.first[part] = own.c_struct(), first
                first += own.k
        return made


class StackAdapter:
    """An adapter of a whole stack; it keeps the factors alive.

    Args:
        layers: for each layer, factors by name of ``PRODUCTS``.
    """

    def __init__(self, layers: Sequence[Mapping[str, PackedLowRank]]) -> None:
        self._layers = tuple(layers)
        flat = (layer[name].c_struct() if name in layer else _LowRank() for layer in layers for name in PRODUCTS)
        self._structs = (_LowRank * (len(layers) * len(PRODUCTS)))(*flat)
        self.address = ctypes.addressof(self._structs)

    @property
    def nbytes(self) -> int:
        """Memory of the factors."""
        return sum(each.nbytes for layer in self._layers for each in layer.values())


class LayerStack:
    """The decoder layers in C++, with their weights and scratch memory. Only one thread may call it at a time.

    Args:
        norm, norm_bias: parameters of the norm after the layers, which ``run`` applies if asked; None for no such norm.
        config: the other fields of ``StackConfig`` in ``stack.h``.
    """

    def __init__(
        self,
        library: Library,
        layers: Sequence[StackLayer],
        norm: Tensor | None = None,
        norm_bias: Tensor | None = None,
        **config: Any,
    ) -> None:
        self.library = library
        self._layers, self._norms = tuple(layers), (norm, norm_bias)  # keeps the weights alive
        self._kept: list[Structure] = []
        self._dim = config["dim"]
        last = {n: None if v is None else _address(v) for n, v in (("norm", norm), ("norm_bias", norm_bias))}
        c_config = _StackConfig(**config, **last, layers=len(layers), bfloat16=library.bfloat16)
        c_layers = (_Layer * len(layers))(*(_filled(_Layer, layer, self._kept) for layer in layers))
        self._stack = library._c.transect_stack_new(byref(c_config), c_layers, library._pool)
        weakref.finalize(self, library._c.transect_stack_free, self._stack)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        slots: Tensor | None = None,
        adapters: Sequence[StackAdapter | None] = (),
        taps: Sequence[int] = (),
        states: Tensor | None = None,
        *,
        finish: bool = False,
    ) -> None:
        """Add every layer's output to ``x`` [T, dim] float32 in place, and write this step's K and V to the caches.
        With ``finish`` the norm after the layers is applied to ``x`` as well.

        Caches are [layers, blocks, kv_heads, block_size, head_dim] as ``empty_cache`` makes them; ``rotation`` is the
        cosine and sine of every position, float32 [positions, head_dim / 2], or None. ``slots`` int32 [T]: the adapter
        of each token among ``adapters``, or -1; None if no token has one. ``x`` in front of the layers ``taps``, which
        ascend, is copied to ``states`` float32 [taps, T, dim].
        """
        if x.dtype != torch.float32 or not x.is_contiguous() or x.shape[1] != self._dim:
            raise ValueError(f"x must be contiguous float32 [tokens, {self._dim}]")
        if finish and self._norms[0] is None:
            raise ValueError("this stack was built without the norm after its layers")
        check_cache(k_cache, v_cache)
        positions = positions.to(torch.int64).contiguous()
        cosine, sine = (None, None) if rotation is None else (table.data_ptr() for table in rotation)
        table = None
        if slots is not None:
            if slots.dtype != torch.int32 or not slots.is_contiguous() or slots.shape != x.shape[:1]:
                raise ValueError("slots must be int32 [tokens]")
            used = set(slots.tolist()) - {-1}
            if any(not 0 <= slot < len(adapters) or adapters[slot] is None for slot in used):
                raise ValueError(f"there are no adapters in some of the slots {sorted(used)}")
            table = (c_void_p * len(adapters))(*(None if each is None else each.address for each in adapters))
        self.library._c.transect_stack_run(
            *(self._stack, x.data_ptr(), x.shape[0], positions.data_ptr()),
            *batch_arguments(block_tables, query_starts, seq_lens),
            *(cosine, sine),
            *(k_cache.data_ptr(), v_cache.data_ptr(), v_cache.shape[1]),
            *(None if slots is None else slots.data_ptr(), table),
            *(len(taps), (c_int * len(taps))(*taps), None if states is None else states.data_ptr(), finish),
        )
