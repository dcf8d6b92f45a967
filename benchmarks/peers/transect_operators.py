"""This project's operators and decoder layer, asked as ``compilers/ladder.py`` asks compilers.

On a CPU the C++ kernels, which compute in float32; on a GPU the registry's Triton kernels, and a layer of the fused
stack in a CUDA graph, as the engine replays it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.compilers.operators import EPS, THETA, Arrays, Work
from benchmarks.peers.peer import Prepared
from benchmarks.peers.torch_eager import Torch
from transect.models.context import PagedContext
from transect.ops import registry
from transect.version import __version__

BLOCK = 16


class Transect(Torch):
    """The operators of the registry, by names of the ladder."""

    def versions(self) -> dict[str, str]:
        return {"transect": __version__, "torch": torch.__version__}

    def lacks(self, work: Work) -> str | None:
        if self.device == "cuda":
            return None
        if work.operator in ("gelu", "softmax"):
            return "no CPU kernel of its own: part of the layer's kernels"
        if work.dtype == "bfloat16" and work.operator not in ("matmul", "decoder_step"):
            return "CPU kernels compute in float32; only weights and K and V are bfloat16"
        return None

    def prepare(self, work: Work, weights: Arrays, data: list[Arrays]) -> Prepared:
        own, sets = self.tensors(weights, work), [self.tensors(each, work) for each in data]
        if work.operator == "decoder_step":
            if self.device == "cuda":
                with torch.inference_mode():
                    run = _in_graph(_fused_layer(work, own, sets[0]))
            else:
                run = _cpu_layer(work, own, sets[0])
            return self.prepared(run, [{}])
        operator = _gpu_operator(work, own) if self.device == "cuda" else self._cpu_operator(work, own)
        return self.prepared(operator, sets)

    def _cpu_operator(self, work: Work, own: dict[str, Tensor]) -> Callable[..., Tensor]:
        from transect.ops.cpu.library import PackedWeight, load
        from transect.ops.cpu.training import kernels

        native, library = kernels(torch.get_num_threads()), load(torch.get_num_threads())
        if work.operator == "rms_norm":
            return lambda x, norm: native.rms_norm(x, norm, EPS)[0]
        if work.operator == "attention":
            ends = torch.tensor([0, work.sizes["tokens"]], dtype=torch.int32)
            return lambda q, k, v: native.attention(q, k, v, ends, 1 / math.sqrt(q.shape[-1]), None)[0]
        kind, packed = library.pack_dense(own["w"])
        n, k = own["w"].shape
        weight = PackedWeight(kind, n, k, packed)
        return lambda x: library.linear(x, weight)


def _gpu_operator(work: Work, own: dict[str, Tensor], device: str = "cuda") -> Callable[..., Tensor]:
    registry.all_ops()
    run = registry.get(work.operator).implementations["triton"].load()
    if work.operator == "matmul":
        return lambda x: run(x, own["w"])
    if work.operator == "gelu":
        return lambda x: run(x, True)
    if work.operator == "rms_norm":
        return lambda x, norm: run(x, norm, EPS)
    if work.operator == "attention":
        ends = torch.tensor([0, work.sizes["tokens"]], dtype=torch.int32, device=device)
        return lambda q, k, v: run(q, k, v, ends, 1 / math.sqrt(q.shape[-1]))
    return run


def _paged(cache: Tensor, like: Tensor) -> Tensor:
    """Lay K or V ``[rows, context, heads, head]`` out in blocks; the strides are those of ``like``."""
    rows, context, heads, head = cache.shape
    blocks = cache.view(rows * context // BLOCK, BLOCK, heads, head).transpose(1, 2)
    return like.copy_(blocks)


def _batch(work: Work, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return positions, block tables, query starts and lengths of a decode batch at full contexts."""
    rows, context = work.sizes["rows"], work.sizes["context"]
    positions = torch.full((rows,), context - 1, device=device)
    tables = torch.arange(rows * context // BLOCK, dtype=torch.int32, device=device).view(rows, -1)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return positions, tables, starts, torch.full((rows,), context, dtype=torch.int32, device=device)


def _cpu_layer(work: Work, own: dict[str, Tensor], data: dict[str, Tensor]) -> Callable[[], Tensor]:
    from transect.ops.cpu.library import PackedWeight, empty_cache, load
    from transect.ops.cpu.stack import LayerStack, StackLayer

    s, library, dtype = work.sizes, load(torch.get_num_threads()), getattr(torch, work.dtype)
    packed: dict[str, Any] = {}
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        kind, bits = library.pack_dense(own[name])
        n, k = own[name].shape
        packed[name] = PackedWeight(kind, n, k, bits)
    norms = {name: own[name].float() for name in ("attention_norm", "mlp_norm")}
    absent = dict.fromkeys(("attention_norm_bias", "mlp_norm_bias", "q_norm", "k_norm"))
    kinds = {torch.float32: 0, torch.bfloat16: 1}
    stack = LayerStack(
        library, [StackLayer(**norms, **absent, **packed, window=0)],
        dim=s["dim"], heads=s["heads"], kv_heads=s["kv_heads"], head_dim=s["head"], ffn=s["ffn"], block_size=BLOCK,
        layer_norm=0, gated=1, activation=0, rotary_half=s["head"] // 2, kv=kinds[dtype],
        norm_eps=EPS, scale=1 / math.sqrt(s["head"]),
    )  # fmt: skip
    positions, tables, starts, lengths = _batch(work, data["x"].device)
    k_cache, v_cache = empty_cache((1, tables.numel(), s["kv_heads"], BLOCK, s["head"]), dtype)
    _paged(data["k_cache"], k_cache[0]), _paged(data["v_cache"], v_cache[0])
    frequencies = THETA ** (-torch.arange(0, s["head"], 2, dtype=torch.float64) / s["head"])
    turns = torch.arange(s["context"], dtype=torch.float64)[:, None] * frequencies
    rotation = turns.cos().float(), turns.sin().float()
    start = data["x"].float()

    def run() -> Tensor:
        x = start.clone()
        stack.run(x, positions, k_cache, v_cache, tables, starts, lengths, rotation)
        return x

    return run


def _fused_layer(work: Work, own: dict[str, Tensor], data: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return the fused stack's layer as a call; on a CPU it needs Triton's interpreter."""
    from transect.checkpoints.load import allocated
    from transect.models.decoder import Decoder
    from transect.models.fused_stack import FusedStack
    from transect.ops.linear.stream_products import StreamProducts
    from transect.ops.opset import resolve_ops, with_dependent_launch
    from transect.spec.model import RopeConfig
    from transect.spec.shapes import PRESETS

    s, x = work.sizes, data["x"]
    config = replace(
        PRESETS["llama-3.1-8b"], n_layers=1, vocab_size=64, dim=s["dim"], ffn_dim=s["ffn"], n_heads=s["heads"],
        n_kv_heads=s["kv_heads"], head_dim=s["head"], norm_eps=EPS, rope=RopeConfig(theta=THETA),
    )  # fmt: skip
    ops = resolve_ops(x.device, ("triton", "torch"))
    if x.is_cuda:
        ops = replace(with_dependent_launch(ops), stream_products=StreamProducts(x.device))
    model = allocated(Decoder(config, "meta", x.dtype, ops=ops), x.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.removesuffix(".weight").rpartition(".")[2]
            if name.startswith("layers.0."):
                parameter.copy_(own[part])
    positions, tables, starts, lengths = _batch(work, x.device)
    caches = model.new_kv_cache(tables.numel(), BLOCK, x.dtype)
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        _paged(data[name], cache[0])
    context = PagedContext(*caches, tables, starts, lengths, ops)
    stack = FusedStack(model, max_positions=s["context"])
    return lambda: stack(x, positions, context)


def _in_graph(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture a call as a CUDA graph, and return its replay."""
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


COMPILER = Transect
