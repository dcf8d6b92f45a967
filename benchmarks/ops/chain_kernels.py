"""The four products between two attentions of one row in one launch, for 8 and 4 bits, beside four launches.

    python benchmarks/ops/chain_kernels.py [int4 fp8 int8 blocks] [--out FILE]

``blocks``: fp8 with scales of blocks.

Llama 3.1 8B's shape, four layers in turn, which do not fit into the L2 cache together; microseconds a layer, the median
of graphs of 20 launches, by how many items each warp asks for ahead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import RATES, Kept
from benchmarks.formats.gpu import SHAPES, product_seconds
from transect.models.staging import Staging
from transect.models.weights.int4_serving import Int4Products, ServingInt4
from transect.models.weights.scaled8 import Products8, Scaled8
from transect.ops.linear.packed.chain import ChainWeights
from transect.ops.linear.packed.eight_bit.scaled8_chain import CudaChain, Matrix8
from transect.ops.linear.packed.eight_bit.scaled8_rounding import rounded
from transect.ops.linear.packed.int4.int4_chain import Int4Chain, Matrix4
from transect.ops.linear.stream_products import StreamProducts

STAGES = {"int4": (5, 4, 3, 2), "fp8": (2,), "int8": (2,), "blocks": (2,)}


def layers(name: str) -> tuple[list[ChainWeights], list[list[Any]]]:
    """Generate four layers' weights for the chain, and their products on the stream."""
    device, ones = torch.device("cuda"), torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    held, products = [], []
    four = Int4Products.on(device, dependent=True) if name == "int4" else None
    form = {"fp8": name != "int8", "blocks": name == "blocks"}
    eight = Products8.on(device, dependent=True, **form)
    for seed in range(4):
        torch.manual_seed(seed)
        parts: list[Any] = []
        for matrix in ("o", "gate_up", "down", "qkv"):
            n, k = SHAPES[matrix]
            made: Any = (
                ServingInt4(n, k, products=four, device=device, dtype=torch.bfloat16) if name == "int4"
                else Scaled8(n, k, products=eight, device=device, dtype=torch.bfloat16, **form)
            )  # fmt: skip
            values = torch.randn(n, k, device=device) * k**-0.5
            if name == "blocks":
                made.codes.copy_(rounded(values, True).codes)
                made.scale.copy_(torch.rand(made.scale.shape) * k**-0.5 / 128)
            else:
                made.load(values, Staging(device))
            made.in_turns = matrix == "gate_up"
            parts.append(made)
        if name == "int4":
            matrices: list[Any] = [Matrix4(part.arranged, part.out_features) for part in parts]
        else:
            matrices = [Matrix8(part.codes, part.scale, part.fp8) for part in parts]
        o, gate_up, down, qkv = matrices
        held.append(ChainWeights(o, gate_up, down, qkv, (ones, ones), (1e-5, 1e-5)))
        products.append([part.stream_product(StreamProducts(device)) for part in parts])
    return held, products


def measure(name: str) -> dict[str, Any]:
    """Measure the seconds of each contender."""
    weights, products = layers(name)
    kernel: Any = Int4Chain(torch.device("cuda")) if name == "int4" else CudaChain(torch.device("cuda"))
    x, residual = (torch.randn(1, 4096, device="cuda").bfloat16() for _ in range(2))
    chained, stream = kernel(x, residual, weights[0])
    o, gate_up, down, qkv = products[0]
    first = o.add(x, residual, weights[0].norms[0], 1e-5)
    second = down.add(gate_up.gated(first), first.total, weights[0].norms[1], 1e-5)
    for one, two in ((chained, qkv.linear(second)), (stream, second.total)):
        if (one.double() - two.double()).norm() > 0.02 * two.double().norm():
            raise ValueError("one launch and four differ")
    moved = sum(t.nbytes for matrix in weights[0].matrices for t in matrix if isinstance(t, torch.Tensor))
    floor = moved / RATES.bytes_per_second
    found: dict[str, Any] = {"floor_s": floor, "ways": {}}
    print(f"{name}: floor {floor * 1e6:.1f} us", flush=True)

    def note(label: str, way: Callable[[int], Any]) -> None:
        seconds = product_seconds(way)
        found["ways"][label] = {"seconds": seconds}
        print(f"    {seconds * 1e6:8.1f} us {floor / seconds:5.0%}  {label}", flush=True)

    def apart(turn: int) -> None:
        o, gate_up, down, qkv = products[turn % 4]
        norm = weights[0].norms[0]
        stream = o.add(x, residual, norm, 1e-5)
        stream = down.add(gate_up.gated(stream), stream.total, norm, 1e-5)
        qkv.linear(stream)

    note("four launches", apart)
    for stages in STAGES[name]:
        note(
            f"one launch, {stages} stages",
            lambda turn, stages=stages: kernel(x, residual, weights[turn % 4], dependent_launch=True, stages=stages),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=list(STAGES))
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "chain_kernels.json")
    options = parser.parse_args()
    kept = Kept(options.out)
    for name in options.formats:
        kept.attempt(f"chain {name}", lambda n=name: measure(n))


if __name__ == "__main__":
    main()
