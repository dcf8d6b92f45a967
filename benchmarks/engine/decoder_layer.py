"""One whole decoder layer in a CUDA graph, beside the sum of its floors, and what each fusion is worth.

    python benchmarks/engine/decoder_layer.py [--out FILE] [--models llama-3.1-8b,qwen3-0.6b] [--rows 1,8,64,256]
    [--quick]

A graph holds several layers with weights and caches of their own, so that nothing is found in the L2 cache; a layer's
time is the graph's over their number, the median of many replays. The floor of a layer: for each product the larger of
its weights' bytes at READ and its FLOPs at RATE, and K and V read once. ``parts`` are times of single operators, each
in a graph of its own over all layers: they do not add up to the layer where kernels overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.ops.graph_time import graph_times
from transect.checkpoints.load import allocated
from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack, Fusions
from transect.models.norm import RMSNorm
from transect.models.weights.dense import Dense
from transect.models.weights.projection import Projection
from transect.ops.linear import gate_up
from transect.ops.linear.stream_products import StreamProducts
from transect.ops.opset import OpSet, resolve_ops, with_dependent_launch
from transect.spec.model import ModelConfig
from transect.spec.shapes import PRESETS
from transect.spec.weights import linear_shapes

READ, RATE = 4.35e12, 750e12
CONTEXT, BLOCK = 1024, 16
LAYERS = {"llama-3.1-8b": 6, "qwen3-0.6b": 14, "qwen3-8b": 6}
"""Layers of a graph: 2.6, 0.44 and 2.3 GB of weights."""
OTHERS = 6
"""Layers of another model, or of a rank's part of one."""
DEFAULT_OUT = record.RESULTS / "h200" / "decoder_layer.json"


def floor(config: ModelConfig, rows: int) -> dict[str, float]:
    """Compute the floor in seconds: products and attention."""
    products = 0.0
    for (outputs, inputs), _ in linear_shapes(config).values():
        products += max(2 * outputs * inputs / READ, 2 * rows * outputs * inputs / RATE)
    attention = rows * CONTEXT * 2 * config.kv_dim * 2 / READ
    return {"products": products, "attention": attention, "layer": products + attention}


def measure(work: Callable[[], Any], replays: int) -> dict[str, float | int]:
    """Measure the seconds of one replay of a graph of ``work``."""
    return record.summary(graph_times([work], replays))


def sizes_of(name: str) -> ModelConfig:
    """Return the sizes of a preset, or of one rank's part of it: ``llama-3.1-8b/2`` is split between two ranks."""
    model, _, ranks = name.partition("/")
    return PRESETS[model].local(int(ranks or 1))


class Chain:
    """Some layers of a model (see ``sizes_of``) on random weights, and a decode batch over filled caches. A rank's
    layers do not wait for sums: they compute one rank's part."""

    def __init__(self, name: str, rows: int) -> None:
        self.config = dataclasses.replace(sizes_of(name), n_layers=LAYERS.get(name, OTHERS), vocab_size=64)
        self.rows = rows
        self.plain_ops = resolve_ops("cuda", ("triton", "torch"))
        streams = StreamProducts(torch.device("cuda", torch.cuda.current_device()))
        self.ops = dataclasses.replace(with_dependent_launch(self.plain_ops), stream_products=streams)
        self.model = allocated(Decoder(self.config, "meta", torch.bfloat16, ops=self.ops), "cuda")
        torch.manual_seed(0)
        self.model.init_weights()
        per_row = CONTEXT // BLOCK
        caches = self.model.new_kv_cache(rows * per_row, BLOCK, torch.bfloat16)
        for cache in caches:
            cache.normal_()
        tables = torch.randperm(rows * per_row, device="cuda", dtype=torch.int32).view(rows, per_row)
        starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
        lengths = torch.full((rows,), CONTEXT, device="cuda", dtype=torch.int32)
        self.context = PagedContext(*caches, tables, starts, lengths, self.ops)
        self.positions = torch.full((rows,), CONTEXT - 1, device="cuda")
        self.x = torch.randn(rows, self.config.dim, device="cuda", dtype=torch.bfloat16)

    def stack(
        self, fusions: Fusions | None = None, *, ops: OpSet | None = None, **replaced: Any
    ) -> Callable[[], torch.Tensor]:
        """Build all layers as a call on ``ops``, of which ``replaced`` are replaced."""
        self.model.ops = dataclasses.replace(ops or self.ops, **replaced)
        for module in self.model.modules():
            if isinstance(module, Dense):
                module.ops = self.model.ops
            elif isinstance(module, Projection):
                for joined in module.joined:  # no module of the model, so not met here
                    joined.ops = self.model.ops  # type: ignore[attr-defined]
            elif isinstance(module, RMSNorm):
                module.op = self.model.ops.rms_norm
        stack = FusedStack(self.model, max_positions=CONTEXT, fusions=fusions)
        return lambda: stack(self.x, self.positions, self.context)

    def parts(self) -> Iterator[tuple[str, Callable[[], Any], float]]:
        """Yield (operator, a call for all layers, the floor of one layer's)."""
        config, rows, ops = self.config, self.rows, self.ops
        layers = FusedStack(self.model, max_positions=CONTEXT)._layers
        x = self.x
        q = torch.randn(rows, config.n_heads, config.head_dim, device="cuda", dtype=torch.bfloat16)
        wide = torch.randn(rows, config.ffn_dim, device="cuda", dtype=torch.bfloat16)
        both = torch.randn(rows, 2 * config.ffn_dim, device="cuda", dtype=torch.bfloat16)
        joined = torch.randn(rows, config.q_dim + 2 * config.kv_dim, device="cuda", dtype=torch.bfloat16)

        sizes = dict(zip(("qkv", "o", "gate_up", "down"), layers[0].sizes, strict=True))

        def product(name: str) -> float:
            outputs, inputs, _ = sizes[name]
            return max(outputs * inputs * 2 / READ, 2 * rows * outputs * inputs / RATE)

        def attend() -> None:
            for layer in layers:
                caches = self.context.k_cache[layer.index], self.context.v_cache[layer.index]
                ops.paged_attention(q, *caches, self.context.batch, config.attention_scale, None)

        def rotate() -> None:
            cos, sin = self.model.rope.cos_sin(self.positions)
            for layer in layers:
                parts = joined.split((config.q_dim, config.kv_dim, config.kv_dim), dim=-1)
                heads = [part.unflatten(-1, (-1, config.head_dim)) for part in parts]
                norms = layer.q_norm, layer.k_norm
                extra = () if norms[0] is None else (norms[0].weight, norms[1].weight, norms[0].eps)
                caches = self.context.k_cache[layer.index], self.context.v_cache[layer.index]
                ops.rotary_kv_write(*heads, cos, sin, *caches, self.context.batch, *extra)

        def all_layers(call: Callable[[Any], Any]) -> Callable[[], None]:
            def run() -> None:
                for layer in layers:
                    call(layer)

            return run

        flat = q.flatten(-2)
        yield "qkv", all_layers(lambda l: l.qkv(x)), product("qkv")
        yield "o", all_layers(lambda l: l.o(flat)), product("o")
        yield "gate_up", all_layers(lambda l: l.gated(x)), product("gate_up")
        yield "down", all_layers(lambda l: l.down(wide)), product("down")
        yield "paged_attention", attend, rows * CONTEXT * 2 * config.kv_dim * 2 / READ
        yield "rotary_kv_write", rotate, 0.0
        norm = layers[0].attention_norm
        yield "add_rms_norm", all_layers(lambda l: ops.add_rms_norm(x, x, norm.weight, norm.eps)), 0.0
        if rows <= 256:
            yield "gate (of gate_up)", all_layers(lambda l: gate_up.gate_halves(both, dependent_launch=True)), 0.0


def variants(chain: Chain) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the layer with everything on, and each thing off separately; norms are in the products only with all on."""
    yield "all", chain.stack()
    yield "norms in products off", chain.stack(stream_products=None)
    for name in ("qkv", "gate_up", "add_norm", "rotary_write"):
        yield f"{name} off", chain.stack(Fusions(**{name: False}))
    yield "dependent launch off", chain.stack(ops=with_dependent_launch(chain.plain_ops, False))
    yield "products by cuBLAS", chain.stack(linear=F.linear, gate_up=_cublas_gate_up, stream_products=None)


def _cublas_gate_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return gate_up.gate_halves(F.linear(x, weight, bias), dependent_launch=True)


def run(name: str, rows: int, replays: int, quick: bool) -> dict[str, Any]:
    chain = Chain(name, rows)
    layers = chain.config.n_layers
    least = floor(chain.config, rows)
    result: dict[str, Any] = {"model": name, "rows": rows, "context": CONTEXT, "layers": layers, "floor_s": least}
    expected = None
    for label, call in variants(chain):
        if quick and label not in ("all", "products by cuBLAS"):
            continue
        try:
            out = call().float()
            expected = out if expected is None else expected
            error = float((out - expected).norm() / expected.norm())
            times = {key: value if key == "runs" else value / layers for key, value in measure(call, replays).items()}
            result.setdefault("variants", {})[label] = {**times, "distance": error}
            share = least["layer"] / times["median"]
            print(f"{name:13} {rows:4} rows {label:20} {times['median'] * 1e6:8.1f} us  {share:6.1%}  d {error:.1e}")
        except Exception:
            traceback.print_exc()
    for label, call, part_floor in chain.parts():
        try:
            seconds = statistics.median([measure(call, replays)["median"]]) / layers
            result.setdefault("parts", {})[label] = {"seconds": seconds, "floor_s": part_floor}
            print(f"    {label:20} {seconds * 1e6:8.1f} us, floor {part_floor * 1e6:6.1f}")
        except Exception:
            traceback.print_exc()
    return result


def table(result: dict[str, Any]) -> str:
    """Format a Markdown table: the layer with everything on, and with each thing off."""
    names = list(result["results"][0]["variants"])
    lines = ["| model | rows | floor, µs | " + " | ".join(names) + " | of floor |", "|---|" + "---|" * (len(names) + 3)]
    for row in result["results"]:
        times = [row["variants"][name]["median"] if name in row["variants"] else None for name in names]
        shown = " | ".join("" if seconds is None else f"{seconds * 1e6:.0f}" for seconds in times)
        share = row["floor_s"]["layer"] / times[0]
        lines.append(
            f"| {row['model']} | {row['rows']} | {row['floor_s']['layer'] * 1e6:.0f} | {shown} | {share:.0%} |"
        )
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    made_at = record.made_at([where])
    return "\n".join(lines) + (
        f"\n\n`python benchmarks/engine/decoder_layer.py` on one {where['gpu']}, {versions}, {made_at}; medians.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-0.6b")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--replays", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="no ablation")
    options = parser.parse_args()
    started = time.monotonic()
    results = []
    with torch.inference_mode():
        for name in options.models.split(","):
            for rows in map(int, options.rows.split(",")):
                results.append(run(name, rows, options.replays, options.quick))
                torch.cuda.empty_cache()
    environment = record.environment(("torch", "triton"))
    result = {"environment": {**environment, "gpu": torch.cuda.get_device_name()}, "results": results}
    result |= {"ceilings": {"read_bytes_per_s": READ, "flops_per_s": RATE}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
