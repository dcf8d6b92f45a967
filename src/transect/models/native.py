"""A ``Decoder`` on the C++ CPU kernels: packed weights in place of ``Linear``, and one call for all layers.

Everything is computed in float32 from the weights exactly as the file holds them; a token's hidden state does not
depend on what else is in the batch or on how its prompt was cut into chunks, to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..formats.ggml_blocks import QuantizedTensor
from ..hardware.cache import cache_folder
from ..ops.cpu.library import GROUP_ROWS, Library, PackedWeight, StackLayer, empty_cache
from ..ops.cpu.packing import pack, read_packed, write_packed
from .config import ModelConfig
from .context import AttentionContext, PagedContext
from .decoder import Decoder, Layer
from .norm import LayerNorm, RMSNorm
from .rope import Rope

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
FIRST_POSITIONS = 2048


class PackedLinear(nn.Module):
    """Replaces ``Linear``: the same call, float32 out."""

    def __init__(self, library: Library, packed: PackedWeight) -> None:
        super().__init__()
        self.library, self.packed = library, packed

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.library.linear(x_TI, self.packed)

    def extra_repr(self) -> str:
        return f"{self.packed.k} -> {self.packed.n}, {self.packed.kind.name}"


class PackedEmbedding(nn.Module):
    """Replaces ``Embedding``: rows decoded to float32."""

    def __init__(self, library: Library, packed: PackedWeight) -> None:
        super().__init__()
        self.library, self.packed = library, packed

    def forward(self, index_T: Tensor) -> Tensor:
        return self.library.rows(self.packed, index_T)

    def extra_repr(self) -> str:
        return f"{self.packed.n} rows of {self.packed.k}, {self.packed.kind.name}"


class NativeStack:
    """``Decoder.stack`` in one C++ call for paged batches; other contexts go through the layers one by one."""

    def __init__(self, model: Decoder, library: Library, kv_dtype: torch.dtype, block_size: int) -> None:
        config = model.config
        self._run_layers = model.run_layers
        self._rope: Rope | None = model.rope
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._kv_dtype, self._block_size = kv_dtype, block_size
        self._stack = library.stack(
            [_stack_layer(layer, config.layer_window(i)) for i, layer in enumerate(model.layers)],
            dim=config.dim,
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            ffn=config.ffn_dim,
            block_size=block_size,
            layer_norm=int(config.norm == "layernorm"),
            gated=int(config.gated_mlp),
            activation=ACTIVATIONS[config.activation],
            rotary_half=config.head_dim // 2,
            kv_bf16=int(kv_dtype == torch.bfloat16),
            norm_eps=config.norm_eps,
            scale=config.attention_scale,
        )

    def __call__(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        if not isinstance(context, PagedContext):
            return self._run_layers(x_TD, positions_T, context)
        if context.k_cache.dtype != self._kv_dtype or context.k_cache.shape[3] != self._block_size:
            raise ValueError(
                f"this model was built for a KV cache of {self._kv_dtype} in blocks of {self._block_size}, not "
                f"{context.k_cache.dtype} in blocks of {context.k_cache.shape[3]}"
            )
        x_TD = x_TD.to(torch.float32).contiguous()
        batch = context.batch
        rotation = self._cos_sin(int(positions_T.max()) + 1) if positions_T.numel() else None
        self._stack.run(
            *(x_TD, positions_T, context.k_cache, context.v_cache),
            *(batch.block_tables, batch.query_starts, batch.seq_lens, rotation),
        )
        return x_TD

    def new_cache(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See ``Decoder.new_kv_cache``: the kernels want the positions of K innermost."""
        return empty_cache(shape, dtype)

    def _cos_sin(self, positions: int) -> tuple[Tensor, Tensor] | None:
        """The table of all positions so far; it doubles when a longer sequence comes."""
        if self._rope is None:
            return None
        if self._rotation is None or self._rotation[0].shape[0] < positions:
            size = FIRST_POSITIONS
            while size < positions:
                size *= 2
            self._rotation = self._rope.cos_sin(torch.arange(size))
        return self._rotation


def unsuitable(config: ModelConfig, block_size: int) -> str | None:
    """Why the C++ kernels cannot run this model, as a sentence; None if they can."""
    if config.head_dim % GROUP_ROWS:
        return (
            f"the C++ kernels need a head size that is a multiple of {GROUP_ROWS}, and this model has {config.head_dim}"
        )
    if block_size % GROUP_ROWS:
        return f"the C++ kernels need a block size that is a multiple of {GROUP_ROWS}, not {block_size}"
    return None


def build_native(
    config: ModelConfig,
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]],
    library: Library,
    *,
    kv_dtype: torch.dtype,
    block_size: int = 16,
    packed_file: Path | None = None,
) -> Decoder:
    """A model whose matrices are packed for ``library``.

    Args:
        weights: every weight by canonical name (see ``shapes.py``); quantized ones stay quantized.
        kv_dtype: bfloat16 or float32, of the KV cache that the model will run on.
        packed_file: where the packed matrices are kept; read if it is there, else written. A file that cannot be
            written is no error: the model is then packed again at the next start.

    Raises:
        ValueError: ``unsuitable`` says why.
    """
    reason = unsuitable(config, block_size)
    if reason is not None:
        raise ValueError(reason)
    model = Decoder(config, device="meta", dtype=torch.float32)
    loaded = dict(weights)
    matrices = {name: w for name, w in loaded.items() if len(w.shape) == 2 and not name.startswith("position_embed")}
    packed = read_packed(packed_file, matrices) if packed_file is not None else None
    if packed is None:
        packed = {name: pack(library, weight) for name, weight in matrices.items()}
        if packed_file is not None:
            _keep(packed_file, packed)
    vectors = {name: _float32(loaded[name]) for name in loaded.keys() - matrices.keys()}
    for name, weight in packed.items():
        prefix = name.removesuffix(".weight")
        if prefix == "embed":
            model.embed = PackedEmbedding(library, weight)  # type: ignore[assignment]
            if config.tied_embeddings:
                model.head = PackedLinear(library, weight)  # type: ignore[assignment]
        else:
            weight = PackedWeight(weight.kind, weight.n, weight.k, weight.data, vectors.pop(f"{prefix}.bias", None))
            parent, _, child = prefix.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(library, weight))
    model.load_state_dict(vectors, assign=True)
    model.requires_grad_(False)
    model.stack = NativeStack(model, library, kv_dtype, block_size)
    return model


def packed_path(source: Path, dtype: str) -> Path:
    """Where the packed form of a weight file is kept; another file under the same name gets another path."""
    state = source.stat()
    identity = f"{source.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{dtype}\0v1"
    return cache_folder() / "packed" / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.pack"


def _keep(path: Path, packed: dict[str, PackedWeight]) -> None:
    try:
        write_packed(path, packed)
    except OSError:
        return


def _float32(weight: Tensor | QuantizedTensor) -> Tensor:
    if isinstance(weight, QuantizedTensor):
        return torch.from_numpy(weight.dequantize()).reshape(weight.shape).contiguous()
    return weight.to(torch.float32).contiguous()


def _stack_layer(layer: nn.Module, window: int | None) -> StackLayer:
    assert isinstance(layer, Layer)
    attention, mlp = layer.attention, layer.mlp

    def packed(module: nn.Module | None) -> PackedWeight:
        assert isinstance(module, PackedLinear)
        return module.packed

    def scale(norm: RMSNorm | LayerNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight.data

    def shift(norm: RMSNorm | LayerNorm) -> Tensor | None:
        return norm.bias.data if isinstance(norm, LayerNorm) else None

    return StackLayer(
        attention_norm=layer.attention_norm.weight.data,
        attention_norm_bias=shift(layer.attention_norm),
        mlp_norm=layer.mlp_norm.weight.data,
        mlp_norm_bias=shift(layer.mlp_norm),
        q_norm=scale(attention.q_norm),
        k_norm=scale(attention.k_norm),
        q=packed(attention.q),
        k=packed(attention.k),
        v=packed(attention.v),
        o=packed(attention.o),
        gate=None if mlp.gate is None else packed(mlp.gate),
        up=packed(mlp.up),
        down=packed(mlp.down),
        window=window or 0,
    )
