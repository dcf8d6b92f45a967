"""A ``Decoder`` on the C++ CPU kernels: ``Packed`` weights, and one call for all layers.

Everything is computed from the weights exactly as the file holds them, in float32 or, in products, from inputs in
bfloat16; a token's hidden state does not depend on what else is in the batch or on how its prompt was cut into chunks,
to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..hardware.cache import cache_folder
from ..ops.cpu.library import GROUP_ROWS, KV_DTYPES, Library, PackedWeight, empty_cache
from ..ops.cpu.packing import pack, read_packed, write_packed
from ..ops.cpu.stack import LayerStack, StackAdapter, StackExperts, StackLayer
from ..ops.opset import OpSet
from ..ops.position.embed_tokens import placed
from ..spec.model import ModelConfig
from ..spec.numbers.int4 import NATIVE_GROUP
from ..spec.numbers.registry import rounding
from .context import AttentionContext, PagedContext
from .decoder import Decoder, Layer
from .mlp import MLP
from .moe import MoE
from .norm import LayerNorm, RMSNorm
from .rope import Rope
from .weights.low_rank import packed_adapter
from .weights.packed import Packed, PackedEmbedding, refuses
from .weights.row_adapted import StepRows
from .weights.weight import Weight

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
FIRST_POSITIONS = 2048
BEYOND = ("experts", "attention sinks", "a norm over all heads of q")
"""Features beyond other stacks that the C++ kernels have."""


class NativeStack:
    """``Decoder.stack`` in one C++ call for paged batches, with the norm after the layers; other contexts go through
    the layers one by one."""

    def __init__(self, model: Decoder, library: Library, kv_dtype: torch.dtype, block_size: int) -> None:
        config = model.config
        self.library = library
        self.adapters: list[StackAdapter | None] = []
        """Adapters by slot. Of a model with one adapter beside its weights, that is in slot 0."""
        self.rows = StepRows()
        """The adapter of each token of a step."""
        factors = {name: low for name, weight in model.weights() if (low := weight.unadapted()[1]) is not None}
        self._one_for_all = bool(factors)
        if factors:
            half = kv_dtype != torch.float32
            self.adapters = [packed_adapter(library, factors, config.n_layers, half=half)]
        self._begin, self._run_layers, self._finish = model.begin, model.run_layers, model.finish
        self._taps = lambda: model.taps
        self._rope: Rope | None = model.rope
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._kv_dtype, self._block_size = kv_dtype, block_size
        self._stack: LayerStack | None = None
        self._made = lambda: LayerStack(
            library,
            [_stack_layer(layer, config.layer_window(i), library) for i, layer in enumerate(model.layers)],
            *(_scale(model.norm), _shift(model.norm)),
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
            kv=KV_DTYPES[kv_dtype],
            qk_norm_whole=int(config.qk_norm_whole),
            norm_eps=config.norm_eps,
            scale=config.attention_scale,
        )

        self._scaled = config.logit_scale != 1.0

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, context: AttentionContext, places_T: Tensor | None = None
    ) -> Tensor:
        """Compute what ``Decoder.forward`` does, with the embedding's look-up and the norm after the layers."""
        x_TD = self._begin(tokens_T if places_T is None else placed(tokens_T, places_T), positions_T)
        if not isinstance(context, PagedContext) or self._scaled:
            return self._finish(self(x_TD, positions_T, context))
        return self._run(x_TD, positions_T, context, finish=True)

    def __call__(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        if not isinstance(context, PagedContext):
            return self._run_layers(x_TD, positions_T, context)
        return self._run(x_TD, positions_T, context, finish=False)

    def _run(self, x_TD: Tensor, positions_T: Tensor, context: PagedContext, *, finish: bool) -> Tensor:
        if context.k_cache.dtype != self._kv_dtype or context.k_cache.shape[3] != self._block_size:
            raise ValueError(
                f"this model was built for a KV cache of {self._kv_dtype} in blocks of {self._block_size}, not "
                f"{context.k_cache.dtype} in blocks of {context.k_cache.shape[3]}"
            )
        x_TD = x_TD.to(torch.float32).contiguous()
        batch = context.batch
        rotation = self._cos_sin(int(positions_T.max()) + 1) if positions_T.numel() else None
        slots_T = self.rows.slots_T
        if self._one_for_all:
            slots_T = torch.zeros(len(x_TD), dtype=torch.int32)
        if self._stack is None:  # scales of keys and values may come after the weights
            self._stack = self._made()
        taps = self._taps()
        states = None if taps is None else x_TD.new_empty(len(taps.layers), *x_TD.shape)
        self._stack.run(
            *(x_TD, positions_T, context.k_cache, context.v_cache),
            *(batch.block_tables, batch.query_starts, batch.seq_lens, rotation),
            *(slots_T, self.adapters),
            *(() if taps is None else (taps.layers, states)),
            finish=finish,
        )
        if taps is not None and states is not None:
            taps.states = list(states.unbind(0))
        return x_TD

    def new_cache(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Allocate caches with the positions of K innermost; see ``Decoder.new_kv_cache``."""
        return empty_cache(shape, dtype)

    def _cos_sin(self, positions: int) -> tuple[Tensor, Tensor] | None:
        """Return the table of all positions so far; its size doubles when a longer sequence arrives."""
        if self._rope is None:
            return None
        if self._rotation is None or self._rotation[0].shape[0] < positions:
            size = FIRST_POSITIONS
            while size < positions:
                size *= 2
            self._rotation = self._rope.cos_sin(torch.arange(size))
        return self._rotation


def refusal(config: ModelConfig, block_size: int, quantization: str | None = None) -> str | None:
    """Return the reason why the C++ kernels cannot run this model, as a sentence; None if they can."""
    beyond = [feature for feature in config.beyond_stacks if feature not in BEYOND] + _beyond_experts(config)
    if beyond:
        return f"the C++ kernels do not have {beyond[0]}"
    form = rounding(quantization)
    if form is not None and (reason := refuses(form)):
        return reason
    moe = config.moe
    widths = [config.dim, config.q_dim] + ([] if moe is None else [moe.expert_dim, moe.shared_dim])
    widths += [config.ffn_dim] if moe is None or moe.dense_layers else []
    odd = [n for n in widths if n % NATIVE_GROUP]
    if quantization is not None and odd:
        return (
            f"the C++ kernels take rows in {quantization} whose length is a multiple of {NATIVE_GROUP}, and this "
            f"model has {odd[0]}"
        )
    if config.head_dim % GROUP_ROWS:
        return (
            f"the C++ kernels need a head size that is a multiple of {GROUP_ROWS}, and this model has {config.head_dim}"
        )
    if block_size % GROUP_ROWS:
        return f"the C++ kernels need a block size that is a multiple of {GROUP_ROWS}, not {block_size}"
    return None


def _beyond_experts(config: ModelConfig) -> list[str]:
    """List what the C++ kernels lack of a model's experts."""
    moe = config.moe
    if moe is None:
        return []
    odd = [n for n in (config.dim, moe.expert_dim, moe.shared_dim) if n % GROUP_ROWS]
    found = {
        "experts that ranks share": moe.ranks > 1,
        "router weights on the inputs of experts": moe.weighs_inputs,
        f"experts of a width that is not a multiple of {GROUP_ROWS}": bool(odd),
    }
    return [name for name, there in found.items() if there]


def native_model(
    config: ModelConfig,
    library: Library,
    kv_dtype: torch.dtype,
    block_size: int = 16,
    *,
    half: bool,
    quantization: str | None = None,
    ops: OpSet | None = None,
) -> Decoder:
    """Build a model whose matrices are ``Packed``, without values; fill it, then call ``run_natively``. If ``refusal``
    gives a reason, its layers run one by one.

    Args:
        kv_dtype: one of ``KV_DTYPES``, of the KV cache that the model will run on.
        half: dense matrices are kept in bfloat16.
        quantization: the layers' matrices are rounded to this, whatever they come in.
        ops: operators for layers that run one by one.

    Raises:
        ValueError: ``refusal`` says why such rows cannot be rounded.
    """
    reason = None if quantization is None else refusal(config, block_size, quantization)
    if reason is not None:
        raise ValueError(reason)
    packed = partial(Packed, library=library, half=half)
    in_layers = partial(packed, rounding=rounding(quantization))
    model = Decoder(config, "meta", torch.float32, ops=ops, kinds=lambda name: packed if name == "head" else in_layers)
    table = packed(config.vocab_size, config.dim)
    model.embed = PackedEmbedding(table)  # type: ignore[assignment]
    if config.tied_embeddings:
        model.head, model.head_tied = table, True
    if half and model.position_embed is not None:
        model.position_embed.to(torch.bfloat16)
    return model.to_empty(device="cpu").requires_grad_(False)


def run_natively(model: Decoder, library: Library, kv_dtype: torch.dtype, block_size: int = 16) -> Decoder:
    """Make a filled model run all layers in one C++ call, for a KV cache of this dtype in blocks of this size."""
    model.stack = NativeStack(model, library, kv_dtype, block_size)
    return model


def packed_matrices(model: Decoder) -> dict[str, Packed]:
    """Return the packed matrices of a model, each once, by the canonical names of their weights."""
    found = {"embed": model.embed.table} if isinstance(model.embed, PackedEmbedding) else {}
    for name, weight in model.weights():
        if isinstance(weight, Packed) and not (name == "head" and model.head_tied):
            found[name] = weight
    return {f"{name}.weight": weight for name, weight in found.items()}


def take_packed(model: Decoder, path: Path) -> bool:
    """Map the matrices of a file that ``keep_packed`` wrote into a model; False if there is no such file."""
    own = packed_matrices(model)
    packed = read_packed(path, own)
    if packed is None:
        return False
    for name, weight in own.items():
        weight.take(packed[name])
    return True


def keep_packed(model: Decoder, path: Path | None) -> None:
    """Write a model's packed matrices, so that the next start maps them. A file that cannot be written is not an error:
    the model is then packed again at the next start."""
    if path is None:
        return
    try:
        write_packed(path, {name: weight.matrix for name, weight in packed_matrices(model).items()})
    except OSError:
        return


def packed_path(source: Path, dtype: str, parts: Sequence[Path] = ()) -> Path:
    """Return the path for the packed form of a weight file, or of its ``parts``; changed files under the same names get
    another path."""
    states = [file.stat() for file in parts or (source,)]
    sizes = "\0".join(f"{state.st_size}\0{state.st_mtime_ns}" for state in states)
    identity = f"{source.resolve()}\0{sizes}\0{dtype}\0v1"
    return cache_folder() / "packed" / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.pack"


def _scale(norm: RMSNorm | LayerNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight.data


def _shift(norm: RMSNorm | LayerNorm) -> Tensor | None:
    return norm.bias.data if isinstance(norm, LayerNorm) else None


def _stack_layer(layer: nn.Module, window: int | None, library: Library) -> StackLayer:
    assert isinstance(layer, Layer)
    attention, mlp = layer.attention, layer.mlp
    before, between = layer.attention_norm, layer.mlp_norm
    assert not isinstance(before, nn.Identity) and not isinstance(between, nn.Identity)
    products = {"o": attention.o, **attention.qkv.parts}
    if isinstance(mlp, MLP):
        products |= {"down": mlp.down, **mlp.gate_up.parts}

    return StackLayer(
        attention_norm=before.weight.data,
        attention_norm_bias=_shift(before),
        mlp_norm=between.weight.data,
        mlp_norm_bias=_shift(between),
        q_norm=_scale(attention.q_norm),
        k_norm=_scale(attention.k_norm),
        **cast(
            dict[str, Any],
            dict.fromkeys(("gate", "up", "down")) | {name: _matrix(w, library) for name, w in products.items()},
        ),
        window=window or 0,
        k_scale=None if attention.kv_scales is None else attention.kv_scales.keys,
        v_scale=None if attention.kv_scales is None else attention.kv_scales.values,
        experts=_stack_experts(mlp, library) if isinstance(mlp, MoE) else None,
        sinks=None if attention.sinks is None else attention.sinks.data,
    )


def _stack_experts(mlp: MoE, library: Library) -> StackExperts:
    moe, router, shared = mlp.moe, mlp.router, mlp.shared_router
    matrices = {"gate": mlp.experts_gate, "up": mlp.experts_up, "down": mlp.experts_down}
    if mlp.shared_gate_up is not None:
        matrices |= {**mlp.shared_gate_up.parts, "shared_down": mlp.shared_down}
    scores = pack(library, router.weight.detach().float())
    bias = None if router.bias is None else router.bias.detach().float().contiguous()
    return StackExperts(
        count=moe.experts,
        used=moe.per_token,
        sigmoid=moe.score == "sigmoid",
        renormalize=moe.renormalize,
        groups=moe.groups,
        groups_kept=moe.groups_kept,
        scale=moe.scale,
        clamp=moe.clamp or 0.0,
        score_bias=router.score_bias,
        router=replace(scores, bias=bias),
        shared_router=None if shared is None else pack(library, shared.weight.detach().float()),
        **{name: _matrix(weight, library) for name, weight in matrices.items()},
    )


def _matrix(weight: Weight, library: Library) -> PackedWeight:
    return weight.unadapted()[0].packed(library)
