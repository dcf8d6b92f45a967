"""A rank's part of a model, built and filled: of every weight its slice is read, and nothing else.

On a CPU the layers run one by one, because ranks add up between them; quantized weights stay packed and are multiplied
by the C++ kernels where those can run. On a GPU the fused stack runs, with the sums between its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from ..checkpoints.kernel_choice import kernels, kv_dtype
from ..checkpoints.load import allocated, fill, rounded_layers, stored_weights
from ..checkpoints.progress import progress
from ..checkpoints.resolve import ModelSource
from ..costs.memory.streaming import StreamPlan
from ..models.decoder import Decoder
from ..models.embedding import Embedding
from ..models.stored import PackedValues, Stored, StoredWeights, Values, joined_codes, joined_rows, within
from ..models.weights.dense import Dense
from ..models.weights.kinds import ROUNDED, rounded_values
from ..models.weights.packed import Packed, PackedEmbedding
from ..models.weights.weight import Kinds
from ..ops.cpu.library import Library
from ..ops.opset import OpSet, resolve_ops
from ..spec.layouts.shards import Shard, WeightPart
from ..spec.numbers.int4 import SERVING_GROUP
from ..spec.numbers.registry import listed, rounding
from .experts import spread_experts
from .mesh import Mesh
from .tensor import ShardedEmbedding, sharded_kinds, sharded_norms

if TYPE_CHECKING:
    from ..models.fused_stack import Fusions

T = TypeVar("T")
GROUP = SERVING_GROUP
"""Numbers of a row that are rounded together, and that are never divided between ranks."""


def shard_weights(weights: StoredWeights, shard: Shard) -> StoredWeights:
    """Yield the weights that a rank has, under the names of its model; reading one reads the rank's part alone."""
    for name, stored in weights:
        part = shard.part(name, stored.shape)
        if part is not None:
            yield shard.own_name(name), part_of(stored, part)


def part_of(stored: Stored, part: WeightPart) -> Stored:
    """Select some rows and columns of a weight, as a weight."""
    if part.stack > 1:
        return _part_of_stack(stored, part)
    bounds = [within(size, cut) for size, cut in zip(stored.shape, part[:2], strict=False)]
    shape = tuple(cut.stop - cut.start for cut in bounds)

    def read(rows: slice, columns: slice) -> Values:
        inner = [within(size, cut) for size, cut in zip(shape, (rows, columns), strict=False)]
        moved = [slice(o.start + i.start, o.start + i.stop) for o, i in zip(bounds, inner, strict=True)]
        return stored.read(*moved)

    def read_codes(rows: slice, columns: slice) -> PackedValues:
        inner = [within(size, cut) for size, cut in zip(shape, (rows, columns), strict=False)]
        moved = [slice(o.start + i.start, o.start + i.stop) for o, i in zip(bounds, inner, strict=True)]
        assert stored.codes is not None
        return stored.codes(*moved)

    if stored.layout is None:
        return Stored(shape, read)
    return Stored(shape, read, stored.layout, read_codes)


def _part_of_stack(stored: Stored, part: WeightPart) -> Stored:
    """Select some rows of each matrix of a stack, and some columns of all, as a weight."""
    each = stored.shape[0] // part.stack
    own = within(each, part.rows)
    height, shape = own.stop - own.start, part.shape(stored.shape)

    def pieces(from_file: Callable[[slice, slice], T], rows: slice, columns: slice) -> list[T]:
        """Return the selected rows of each matrix."""
        wanted = within(shape[0], rows)
        found = []
        for matrix in range(wanted.start // height, -(-wanted.stop // height)):
            first = max(0, wanted.start - matrix * height)
            last = min(height, wanted.stop - matrix * height)
            start = matrix * each + own.start
            found.append(from_file(slice(start + first, start + last), columns))
        return found

    def read(rows: slice, columns: slice) -> Values:
        return joined_rows(pieces(stored.read, rows, columns))

    def read_codes(rows: slice, columns: slice) -> PackedValues:
        assert stored.codes is not None
        return joined_codes(pieces(stored.codes, rows, columns))

    if stored.layout is None:
        return Stored(shape, read)
    return Stored(shape, read, stored.layout, read_codes)


def load_shard(
    source: ModelSource,
    mesh: Mesh,
    *,
    dtype: str = "auto",
    native: bool | None = None,
    threads: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    deterministic: bool = False,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    stream: StreamPlan | None = None,
) -> tuple[Decoder, str, bool]:
    """Load this rank's part of a model on the CPU.

    Also returns a sentence for the start-up line (what computes the model, and why) and True if it is the C++ kernels.

    The arguments are those of ``checkpoints.load.load_model``.

    Raises:
        ValueError: as there, or the model or its file cannot be cut between this number of ranks.
    """
    shard = mesh.shard(source.config)
    library, why = kernels(
        shard.local,
        dtype=dtype,
        native=native if stream is None else False,
        threads=threads,
        block_size=block_size,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        shared=True,
    )
    if library is None:
        model = _torch_model(source, shard, mesh, dtype, deterministic, stream)
    else:
        why = f"{why}, layers one by one"
        half = dtype != "float32"
        ops = resolve_ops("cpu", batch_invariant=deterministic or not half)
        model = _packed_model(source, shard, mesh, library, ops, half=half, quantization=quantization)
    weights = stored_weights(source, seed)
    if quantization is not None:
        refuse_adapter(source)
        if library is not None:
            check_groups(shard, GROUP)
        elif (values := rounded_values(quantization)) is not None:
            weights = rounded_layers(weights, values)
        else:
            raise ValueError(
                f"{quantization} over several ranks on a CPU is for the C++ kernels, which do not run here ({why}); "
                f"leave quantization out, or take {listed(each.name for each in ROUNDED)}"
            )
    spread_experts(model, shard, mesh)
    return fill(model, shard_weights(weights, shard)).requires_grad_(False), why, library is not None


def refuse_adapter(source: ModelSource) -> None:
    """Refuse a model with an adapter and packed weights that is to be sharded. Raises ValueError."""
    if source.adapter is not None:
        raise ValueError(
            "quantized weights over several devices take no adapter: leave one of them out, or merge the adapter first "
            "(transect export --merge)"
        )


def load_shard_on_device(
    source: ModelSource,
    *,
    mesh: Mesh,
    dtype: torch.dtype,
    ops: OpSet,
    max_positions: int,
    seed: int = 0,
    fusions: Fusions | None = None,
    kinds: Kinds | None = None,
    group: int = GROUP,
    stream: StreamPlan | None = None,
) -> Decoder:
    """Load this rank's part of a model on its GPU; the arguments are those of ``checkpoints.load.load_on_device``.
    ``group``: block size along a row that is never divided between ranks, if ``kinds`` are given.

    Raises:
        ValueError: as there, or the model cannot be cut between this number of ranks.
    """
    device = mesh.world.device
    shard = mesh.shard(source.config)
    if kinds is not None:
        refuse_adapter(source)
        check_groups(shard, group)
    model = Decoder(shard.local, "meta", dtype, ops=ops, kinds=sharded_kinds(kinds, shard, mesh.tensor))
    shard_embedding(model, shard, mesh, dtype)
    join = stream is None or fusions is None or fusions.qkv
    model = allocated(model, device, stream, join=join)
    with progress(source) as advance:
        weights = shard_weights(stored_weights(source, seed, dtype, device), shard)
        fill(model, weights, advance=advance if mesh.world.rank == 0 else None)
    spread_experts(model, shard, mesh)
    from ..models.fused_stack import FusedStack, refusal

    if refusal(source.config) is None:
        model.stack = FusedStack(model, max_positions=max_positions, fusions=fusions)
    return model


def shard_embedding(model: Decoder, shard: Shard, mesh: Mesh, dtype: torch.dtype) -> None:
    """Put this rank's part of the embedding, and of the head, into a model that is on ``meta``."""
    keep_ends(model, shard, dtype)
    sharded_norms(model, shard, mesh.tensor)
    if mesh.tensor.size == 1 or not has_embedding(shard):
        return
    tokens = shard.vocabulary
    table = Embedding(tokens.stop - tokens.start, shard.model.dim, device="meta", dtype=dtype)
    model.embed = ShardedEmbedding(table, mesh.tensor, tokens)  # type: ignore[assignment]
    model.tie_weights()


def has_embedding(shard: Shard) -> bool:
    """Return True if a stage has the embedding, as its input or as its head."""
    return shard.first or (shard.last and shard.model.tied_embeddings)


def keep_ends(model: Decoder, shard: Shard, dtype: torch.dtype) -> None:
    """Replace an embedding or a head that this stage lacks by one of no rows."""
    if not has_embedding(shard):
        model.embed = Embedding(0, shard.model.dim, device="meta", dtype=dtype)
    if not shard.first:
        model.position_embed = None
    if not shard.last:
        model.head = Dense(0, shard.model.dim, ops=model.ops, device="meta", dtype=dtype)
        model.head_tied = shard.model.tied_embeddings


def check_groups(shard: Shard, group: int) -> None:
    """Check that no rank's part ends within a group of numbers that share a scale, when weights are quantized to 4
    bits.

    Raises:
        ValueError: one does.
    """
    local, moe = shard.local, shard.local.moe
    columns = {"o": local.q_dim}
    if moe is None or moe.dense_layers:
        columns["down"] = local.ffn_dim
    if moe is not None:
        columns |= (
            {"shared_down": moe.shared_dim}
            if shard.expert_ranks > 1
            else {"experts_down": moe.expert_dim, "shared_down": moe.shared_dim}
        )
    for name, size in columns.items():
        if shard.ranks > 1 and size % group:
            raise ValueError(
                f"quantization rounds groups of {group} numbers of a row together, and {shard.ranks} ranks would have "
                f"{size} columns of {name} each: take fewer ranks, or leave quantization out"
            )


def _torch_model(
    source: ModelSource, shard: Shard, mesh: Mesh, dtype: str, deterministic: bool, stream: StreamPlan | None
) -> Decoder:
    number_type = kv_dtype(dtype)
    ops = resolve_ops("cpu", batch_invariant=deterministic or number_type is torch.float32)
    model = Decoder(shard.local, "meta", number_type, ops=ops, kinds=sharded_kinds(None, shard, mesh.tensor))
    shard_embedding(model, shard, mesh, number_type)
    return allocated(model, "cpu", stream, join=False)


def _packed_model(
    source: ModelSource, shard: Shard, mesh: Mesh, library: Library, ops: OpSet, *, half: bool, quantization: str | None
) -> Decoder:
    packed = partial(Packed, library=library, half=half, whole=shard.ranks == 1)
    in_layers = partial(packed, rounding=rounding(quantization))
    kinds = sharded_kinds(lambda name: packed if name == "head" else in_layers, shard, mesh.tensor)
    model = Decoder(shard.local, "meta", torch.float32, ops=ops, kinds=kinds)
    keep_ends(model, shard, torch.float32)
    sharded_norms(model, shard, mesh.tensor)
    if not has_embedding(shard):
        return model.to_empty(device="cpu")
    tokens = shard.vocabulary
    table = packed(tokens.stop - tokens.start, shard.model.dim)
    model.embed = PackedEmbedding(table)  # type: ignore[assignment]
    if mesh.tensor.size > 1:
        model.embed = ShardedEmbedding(model.embed, mesh.tensor, tokens)  # type: ignore[assignment]
    if shard.model.tied_embeddings and shard.last:
        if mesh.tensor.size > 1:
            model.head.inner = table  # type: ignore[assignment]
        else:
            model.head = table
    model.head_tied = shard.model.tied_embeddings
    if half and model.position_embed is not None:
        model.position_embed.to(torch.bfloat16)
    return model.to_empty(device="cpu")
