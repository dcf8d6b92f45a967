"""Loading of a source into a ``Decoder`` that is ready to run on a device.

``stored_weights`` are a source's weights under their canonical names, each read when asked for, whole or a part of it;
``fill`` reads them into any model, wherever it is and whatever kinds of weight it has. Around these two are three ways
to compute: the C++ CPU kernels (``models/native.py``), which keep quantized weights quantized and compute from exactly
what the file holds, in float32 or with inputs in bfloat16; plain torch, for which quantized weights are dequantized
when they are loaded; and, on a GPU, the fused stack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..costs.memory.streaming import StreamPlan
from ..models.decoder import Decoder
from ..models.native import (
    keep_packed,
    native_model,
    packed_matrices,
    packed_path,
    run_natively,
    take_packed,
)
from ..models.staging import Staging, dense_values
from ..models.stored import ALL, Stored, StoredWeights, Values
from ..models.streaming.stream import offload
from ..models.weights.kinds import kinds_for, rounded_values
from ..models.weights.weight import Kinds, Weight, part_of
from ..ops.opset import OpSet, resolve_ops
from .adapter import StoredAdapter, merged_weights, put_beside
from .adapter_peft import read_adapter
from .dummy import dummy_weights
from .gguf import stored_gguf
from .hf import stored_hf
from .kernel_choice import cache_dtype, in_blocks, kernels, kv_dtype, lacks_layers
from .layouts import held_layouts
from .progress import progress
from .resolve import ModelSource

if TYPE_CHECKING:
    from ..models.fused_stack import Fusions
    from ..models.row_adapters import AdapterRoom

log = logging.getLogger(__name__)


def stored_weights(
    source: ModelSource,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    beside: StoredAdapter | None = None,
) -> StoredWeights:
    """Yield every weight of the model by canonical name, to be read from its files; see ``stored_gguf`` and
    ``stored_hf``. A source that is only a shape gets random weights of ``seed``, in ``dtype`` on ``device``.

    The adapter of a source is in the weights. With ``beside``, which is that adapter, the layers' matrices are without
    it, for ``put_beside``.

    Raises:
        ValueError: files that are damaged or do not fit the configuration.
    """
    if source.adapter is not None:
        adapter = beside or adapter_of(source)
        base = source.adapter.base
        return merged_weights(stored_weights(base), base.config, adapter, source.config, beside=beside is not None)
    if source.kind == "gguf":
        return stored_gguf(source.gguf, source.config)
    if source.kind == "shape":
        return dummy_weights(source.config, seed=seed, dtype=dtype, device=device)
    return stored_hf(source.path, source.config)


def adapter_of(source: ModelSource) -> StoredAdapter:
    """Return the adapter of a source that has one, over the numbers of its base.

    Raises:
        ValueError: see ``read_adapter`` and ``as_plain_lora``.
    """
    from .adapter_start import as_plain_lora

    assert source.adapter is not None
    adapter = read_adapter(source.adapter.path, source.config)
    return as_plain_lora(adapter, stored_weights(source.adapter.base), source.config)


@torch.no_grad()
def fill(
    model: Decoder,
    weights: StoredWeights,
    *,
    rank: int = 0,
    ranks: int = 1,
    advance: Callable[[int], object] | None = None,
) -> Decoder:
    """Read weights into a model that has memory, one at a time, in the model's dtype: the one way in for all models.

    Each weight takes what it is given in its own way: dense ones are rounded on the device, ones in 4 bits are
    quantized there, packed ones are packed. Files come through pinned memory where the device is a GPU.

    Args:
        rank, ranks: given if the model is a shard, with matrices ``ranks`` times as small as the files' in one
            dimension: of each, part ``rank`` is read and nothing else.
        advance: told of the bytes of each weight that has been read.

    Raises:
        ValueError: files that are damaged, or a model that is not a shard of them.
    """
    with Staging(model.device) as staging:
        for name, stored in weights:
            target = _target(model, name)
            part = _part(name, stored.shape, target.shape, rank, ranks)
            values: Any
            if stored.layout is not None and isinstance(target, Weight) and target.takes(stored.layout):
                assert stored.codes is not None
                values = stored.codes(*part)
            else:
                values = stored.read(*part)
            if isinstance(target, Tensor):
                staging.copy(dense_values(values), target)
            else:
                target.load(values, staging)
            if model.offloaded is not None:
                model.offloaded.keep(name, model)
            if name == "embed.weight" and _copied_head(model):
                head: Any = model.head
                if stored.layout is not None and head.takes(stored.layout):
                    assert stored.codes is not None
                    head.load(stored.codes(*part), staging)
                else:
                    head.load(values, staging)
            if advance is not None:
                advance(values.nbytes)
    return model


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    native: bool | None = None,
    threads: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    deterministic: bool = False,
    quantization: str | None = None,
    stream: StreamPlan | None = None,
    kv_cache_dtype: str = "auto",
) -> Decoder:
    """Build the model and fill it, for inference (``requires_grad`` is off; turn it on to train).

    Args:
        source: from ``resolve``.
        dtype: of weights and activations: ``auto``, ``float32``, ``bfloat16``, ``float16`` or ``float64``. ``auto`` is
            bfloat16 where weights must be dense, and the file's own formats on the C++ kernels. With ``bfloat16`` these
            also round the inputs of products, if the processor has AVX512-BF16. ``float32`` is exact: the dequantized
            values of the file.
        device: target device; the C++ kernels run on ``cpu`` only.
        native: use the C++ kernels: True insists, False forbids, None uses them if they can run. ``kernels`` decides,
            and what it decided is logged.
        threads: of the C++ kernels; by default torch's number.
        block_size: tokens of a KV block; the C++ kernels are set up for one size, and for a KV cache of
            ``kv_dtype(dtype)``.
        seed: of the random weights that a source without weights gets.
        deterministic: a token's hidden state is the same to the bit in any batch. The C++ kernels and ``float32`` are
            so always.
        quantization: a name of ``spec.numbers.registry.roundings``: the layers' matrices are rounded to it when they
            are loaded. The C++ kernels keep them so; plain torch keeps them too, except 4 bits, where it computes with
            the values that the codes stand for.
        stream: layers that live elsewhere and come in their turn; plain torch computes then.
        kv_cache_dtype: data type of the KV cache, as ``EngineConfig`` names it.

    Raises:
        ValueError: files that are damaged or do not fit the configuration, an unknown dtype, or ``native=True`` where
            the kernels cannot run.
    """
    library, why = kernels(
        source.config,
        dtype=dtype,
        device=device,
        native=native if stream is None else False,
        threads=threads,
        block_size=block_size,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        blocks=in_blocks(source),
    )
    log.info("%s: %s", source.name, why)
    if library is None:
        return _load_torch(source, dtype, torch.device(device), seed, deterministic, quantization, stream)
    half, by_layer = dtype != "float32", lacks_layers(source.config, block_size, quantization)
    ops = resolve_ops("cpu", batch_invariant=deterministic or not half) if by_layer else None
    model = native_model(
        source.config, library, kv_dtype(dtype), block_size, half=half, quantization=quantization, ops=ops
    )
    kept = "auto" if half else dtype
    stem = kept if quantization is None else f"{kept}-{quantization}"
    packed_file = packed_path(source.path, stem, source.gguf.parts) if source.kind == "gguf" else None
    beside = None
    if source.adapter is not None and (quantization is not None or source.kind == "gguf"):
        beside = adapter_of(source)
        if beside.replaced or {"embed", "head"} & set(beside.factors):
            packed_file = None  # its tables are not those of the file
    weights = stored_weights(source, seed, beside=beside)
    if packed_file is None or not take_packed(model, packed_file):
        fill(model, weights)
        keep_packed(model, packed_file)
    else:
        there = packed_matrices(model)
        fill(model, (each for each in weights if each[0] not in there))
    if beside is not None and any(name.startswith("layers.") for name in beside.factors):
        put_beside(model, beside)
        lacks = (name for name, low in beside.factors.items() if low.magnitude is not None or ".shared_" in name)
        by_layer = by_layer or any(lacks)  # the C++ layers have neither DoRA nor adapters of shared experts
        log.info("the adapter stays beside packed weights%s", ": layers run operator by operator" if by_layer else "")
    if by_layer:
        return model
    return run_natively(model, library, cache_dtype(dtype, kv_cache_dtype), block_size)


def _load_torch(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    seed: int,
    deterministic: bool,
    quantization: str | None,
    stream: StreamPlan | None,
) -> Decoder:
    number_type = kv_dtype(dtype)
    # float32 is the mode in which a request gives the same tokens alone and in any batch
    ops = resolve_ops(device, batch_invariant=deterministic or number_type is torch.float32)
    values = rounded_values(quantization)
    kinds = kinds_for(quantization, "cpu", batch_invariant=deterministic) if values is None else None
    packed = quantization is None and source.adapter is None and stream is None and not deterministic
    if packed and number_type is not torch.float32:
        kinds = kinds_for(None, device, layouts=held_layouts(source, gguf=device.type == "cuda"))
    model = allocated(Decoder(source.config, "meta", number_type, ops=ops, kinds=kinds), device, stream, join=False)
    weights = stored_weights(source, seed)
    if kinds is not None:
        return fill(model, weights).requires_grad_(False)
    if values is not None and source.adapter is not None:  # added to the values that the codes stand for
        adapter = adapter_of(source)
        base = source.adapter.base
        weights = merged_weights(rounded_layers(stored_weights(base), values), base.config, adapter, source.config)
    elif values is not None:
        weights = rounded_layers(weights, values)
    return fill(model, weights).requires_grad_(False)


def rounded_layers(weights: StoredWeights, values: Callable[[Tensor], Tensor]) -> StoredWeights:
    """Yield the same weights with the layers' matrices replaced by ``values`` of them, the values of rounded codes."""
    for name, stored in weights:
        if name.startswith("layers.") and len(stored.shape) == 2 and not name.endswith("router.weight"):

            def read(rows: slice, columns: slice, stored: Stored = stored) -> Values:
                return values(dense_values(stored.read()))[rows, columns]

            yield name, Stored(stored.shape, read)
        else:
            yield name, stored


def load_on_device(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ops: OpSet,
    max_positions: int,
    seed: int = 0,
    fusions: Fusions | None = None,
    kinds: Kinds | None = None,
    stream: StreamPlan | None = None,
    adapters: AdapterRoom | None = None,
) -> Decoder:
    """Build the model on a GPU, with joined weights and the fused stack, and fill it, for inference.

    Memory is allocated once, as it will be used; each weight is then read into its place. Random weights are drawn on
    the device.

    Args:
        dtype: of weights and activations.
        ops: operators to compute with.
        max_positions: of the longest sequence.
        seed: of the random weights that a source without weights gets.
        fusions: fusions of the layers' operations; None for all that are possible.
        kinds: of weight, as in ``Decoder``.
        stream: layers that live elsewhere and come in their turn.
        adapters: room for adapters of rows.

    Raises:
        ValueError: files that are damaged or do not fit the configuration.
    """
    join = stream is None or fusions is None or fusions.qkv
    model = allocated(Decoder(source.config, "meta", dtype, ops=ops, kinds=kinds), device, stream, join=join)
    beside = None
    if source.adapter is not None and kinds is not None:
        refuse_beside(stream)
        beside = adapter_of(source)
    with progress(source) as advance:
        fill(model, stored_weights(source, seed, dtype, device, beside=beside), advance=advance)
    if beside is not None:
        put_beside(model, beside)
    if adapters is not None:
        from ..models.row_adapters import TensorAdapters

        TensorAdapters(model, *adapters)
    from ..models.fused_stack import FusedStack, refusal

    if refusal(source.config) is None:
        model.stack = FusedStack(model, max_positions=max_positions, fusions=fusions)
    return model


def refuse_beside(stream: StreamPlan | None) -> None:
    """Refuse streamed layers with an adapter beside them. Raises ValueError."""
    if stream is not None:
        raise ValueError(
            "layers that stream take no adapter beside quantized weights: leave out cpu_offload_gb or quantization, or "
            "merge the adapter first (transect export --merge)"
        )


def allocated(
    model: Decoder, device: torch.device | str, stream: StreamPlan | None = None, *, join: bool = True
) -> Decoder:
    """Allocate memory on a device for a model that was built on ``meta``, not filled, for inference.

    Args:
        stream: layers that get memory elsewhere, and slots on the device.
        join: lay what shares an input in one storage; at most the matrices of one projection are held twice meanwhile.
    """
    if join:
        model.join()
    if stream is None:
        model.to_empty(device=device)
        for buffer in model.buffers():
            if buffer.dtype == torch.int64:  # places in a tensor, which a run to warm up reads before they are there
                buffer.zero_()
        return model.requires_grad_(False)
    model.offloaded = offload(model, list(model.layers), stream, torch.device(device))
    model.tie_weights()
    return model.requires_grad_(False)


class _Loads(Protocol):
    """A matrix of a model that loads a file's values in its own way."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def load(self, values: Values, staging: Staging) -> None: ...


def _target(model: Decoder, name: str) -> _Loads | Tensor:
    """Return the module or tensor that receives the weight of this canonical name."""
    owner, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    if leaf == "weight" and hasattr(module, "load"):
        return module
    parameter: Tensor = getattr(module, leaf)
    return parameter.detach()


def _copied_head(model: Decoder) -> bool:
    """Return True if the head is a copy of the embedding's table in another format."""
    return model.config.tied_embeddings and not model.head_tied


def _part(name: str, stored: tuple[int, ...], wanted: tuple[int, ...], rank: int, ranks: int) -> tuple[slice, slice]:
    """Return the rows and columns of a file's weight that belong to a shard."""
    parts = [ALL, ALL]
    cut = [dim for dim, (size, own) in enumerate(zip(stored, wanted, strict=False)) if size != own]
    if len(stored) != len(wanted) or len(cut) > 1 or any(stored[dim] != ranks * wanted[dim] for dim in cut):
        raise ValueError(
            f"{name} is {list(stored)} in the files and {list(wanted)} in the model, which is neither that nor one of "
            f"{ranks} equal parts of it"
        )
    for dim in cut:
        parts[dim] = part_of(stored[dim], rank, ranks)
    return parts[0], parts[1]
