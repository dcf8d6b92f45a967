"""Products with weights in block types of GGUF files on one Hopper GPU: every way to cut them, beside the floor of
their bytes and bfloat16's product.

    python benchmarks/ops/gguf_kernels.py [--rows 1,8,16,32,64,128] [--types Q4_K,Q6_K] [--shapes o,down] [--out FILE]
    python benchmarks/ops/gguf_kernels.py --chain             four products of one row in one launch, beside four
    launches

``--types int4``: 4 bits in groups of 128, by tiles and by the other kernels.

Shapes are those of the matrices of Llama 3.1 8B. A time is the median of graphs of 20 launches over copies of the
weight that do not fit into the L2 cache together. The first result of each way is compared with the product of the
values in float32: a way that misses by more than 1% is marked, and is not chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import RATES, Kept, release
from benchmarks.formats.gpu import SHAPES, product_seconds
from transect.ops.lang.jit import multiprocessors
from transect.ops.linear import gate_up
from transect.ops.linear.packed import block_tiles
from transect.ops.linear.packed.chain import ChainWeights
from transect.ops.linear.packed.gguf import gguf_chain, gguf_row, gguf_rows, gguf_tiles
from transect.ops.linear.packed.gguf.gguf_matmul import dequantize, drawn, rebuilt
from transect.ops.linear.packed.gguf.gguf_row import BlockPart
from transect.ops.linear.packed.int4 import int4_hopper, int4_matmul, int4_rows, int4_tiles
from transect.ops.linear.packed.int4.int4_packing import arrange_codes
from transect.ops.registry import get
from transect.spec.numbers.gguf import UNITS

Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MATRICES = SHAPES | {"head": (128256, 4096)}


def ways(name: str, m: int, n: int, k: int, gated: bool, kernels: str) -> Iterator[tuple[str, Way]]:
    """Yield every way of some ``kernels`` to multiply m rows by a weight of a type, with its name."""
    device = torch.device("cuda")
    units, unit = multiprocessors(device), UNITS[name].unit
    rows = gguf_rows.GGUFRows(device)
    if m == 1 and "chain" in kernels:
        alone = gguf_row.GGUFRow(device)
        for ahead in (8, 4, 2):

            def one_row(x: torch.Tensor, w: torch.Tensor, stages: int = ahead) -> torch.Tensor:
                matrix = (BlockPart(w, name, n),)
                return alone(x, matrix, gated=gated, dependent_launch=True, stages=stages)[0]

            yield f"one row, {ahead} stages", one_row
    if m <= 8 and "rows" in kernels:
        known = set()
        cuts = [(c, w, r, None) for c in (1, 2) for w in (8, 12, 16) for r in (1, 2)]
        cuts += [(c, 16, 1, 16 >> e) for c in (1, 2) for e in range(5 - gated)]
        for columns, warps, resident, teams in cuts:
            cut = gguf_rows.tiling_of(m, n, k, unit, units, columns, warps, resident=resident, gated=gated, teams=teams)
            if cut is not None and cut not in known:
                known.add(cut)
                yield (
                    f"rows {cut.columns}x{cut.warps} per {cut.per} teams {cut.teams} stages {cut.stages} x{resident}",
                    lambda x, w, cut=cut: rows(x, w, name, n, gated=gated, dependent_launch=True, tiling=cut),
                )
    if not gated and "tiles" in kernels:
        tiles = gguf_tiles.GGUFTiles(device)
        for label, tiling in tilings(unit, m, n, k, units):
            yield label, lambda x, w, cut=tiling: tiles(x, w, name, n, dependent_launch=True, tiling=cut)
        if m >= 64:
            yield "rebuilt", lambda x, w: rebuilt(x, w, name, n)
        if n == MATRICES["gate_up"][0]:
            yield (
                "tiles, then the gate",
                lambda x, w: gate_up.gate_halves(
                    tiles(x, w, name, n, dependent_launch=True), turns=16, dependent_launch=True
                ),
            )
            yield "tiles with the gate", lambda x, w: tiles(x, w, name, n, gated=True, dependent_launch=True)


def tilings(unit: int, m: int, n: int, k: int, units: int) -> Iterator[tuple[str, block_tiles.BlockTiling]]:
    """Yield every division into tiles that may suit m rows, with its name."""
    for cut in block_tiles.CUTS:
        tiling = block_tiles.tiling_of(cut, unit, m, n, k, units)
        if min(m / 2, 128) <= cut[0] <= max(16, 1.5 * m) and tiling is not None:
            yield "tiles {}x{}x{}".format(*cut) + " together" * tiling.together, tiling


def missed(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error of a result; one with a gate is half as wide."""
    if found.shape[1] < wanted.shape[1]:
        turns = wanted.unflatten(-1, (-1, 2, 16))
        wanted = torch.nn.functional.silu(turns[:, :, 0].flatten(1)) * turns[:, :, 1].flatten(1)
    return float((found.float() - wanted).norm() / wanted.norm())


def measure(matrix: str, name: str, rows: list[int], kernels: str) -> dict[str, Any]:
    """Measure the microseconds of all ways, by rows."""
    n, k = MATRICES[matrix]
    weight = drawn(name, n, k, "cuda")
    copies = [weight, *(weight.clone() for _ in range(max(1, int(120e6 // weight.nbytes))))]
    values = dequantize(weight, name, n, k, torch.float32)
    dense = [values.bfloat16() for _ in range(max(2, int(120e6 // (2 * n * k))))]
    plain: Any = get("linear").implementations["triton"].load()
    found: dict[str, Any] = {}
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        wanted = x.float() @ values.T
        moved = weight.nbytes + 2 * m * (n + k)
        floor = max(moved / RATES.bytes_per_second, 2 * m * n * k / RATES.flops_per_second)
        peer = product_seconds(lambda turn, x=x: plain(x, dense[turn % len(dense)], dependent_launch=True))
        own: dict[str, Any] = {}
        gated = matrix == "gate_up" and m <= 8 and kernels != "tiles"
        for label, way in ways(name, m, n, k, gated, kernels):
            try:
                miss = missed(way(x, weight), wanted)
                seconds = product_seconds(lambda turn, x=x, way=way: way(x, copies[turn % len(copies)]))
                own[label] = {"seconds": seconds, "miss": miss}
            except (RuntimeError, ValueError) as error:
                own[label] = {"error": str(error)[:200]}
        right = {label: each for label, each in own.items() if each.get("miss", 1) < 0.01}
        best = min(right, key=lambda label: right[label]["seconds"]) if right else None
        found[str(m)] = {"floor_s": floor, "bf16_s": peer, "best": best, "ways": own}
        print(f"{matrix} {name} {m} rows: floor {floor * 1e6:.1f} us, bf16 {peer * 1e6:.1f}", flush=True)
        for label, each in sorted(own.items(), key=lambda item: item[1].get("seconds", 9)):
            if "seconds" in each:
                wrong = "" if each["miss"] < 0.01 else f"  WRONG, misses {each['miss']:.2g}"
                print(f"    {each['seconds'] * 1e6:8.1f} us {floor / each['seconds']:5.0%}  {label}{wrong}", flush=True)
            else:
                print(f"    {label}: {each['error']}", flush=True)
    return found


def measure_int4(matrix: str, rows: list[int]) -> dict[str, Any]:
    """Measure the microseconds of tiles of 4 bits in groups of 128 beside the other ways, by rows."""
    n, k = MATRICES[matrix]
    generator = torch.Generator("cuda").manual_seed(1)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda", generator=generator)
    scale = (torch.rand(n, k // 128, device="cuda", generator=generator) + 0.1) * k**-0.5 / 4
    weight = arrange_codes(codes, scale, -7.5 * scale)
    values = int4_matmul.dense(weight, n, torch.float32)
    copies = [weight, *(weight.clone() for _ in range(max(1, int(120e6 // weight.nbytes))))]
    device = torch.device("cuda")
    kernels: dict[str, Any] = {
        "rows": int4_rows.CudaCodes(), "hopper": int4_hopper.HopperCodes(), "rebuilt": int4_matmul.rebuilt
    }  # fmt: skip
    tiles, units, unit = int4_tiles.Int4Tiles(device), multiprocessors(device), int4_tiles.unit_of(128)
    found: dict[str, Any] = {}
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        wanted = x.float() @ values.T
        each: dict[str, Way] = {}
        for name in ("rows", "hopper") if m <= 64 else ("rebuilt",):
            own = {} if name == "rebuilt" else {"dependent_launch": True}
            each[name] = lambda x, w, run=kernels[name], own=own: run(x, w, n, **own)
        for label, tiling in tilings(unit, m, n, k, units):
            each[label] = lambda x, w, cut=tiling: tiles(x, w, n, dependent_launch=True, tiling=cut)
        if matrix == "gate_up":
            each["tiles, then the gate"] = lambda x, w: gate_up.gate_halves(
                tiles(x, w, n, dependent_launch=True), turns=16, dependent_launch=True
            )
            each["tiles with the gate"] = lambda x, w: tiles(x, w, n, gated=True, dependent_launch=True)
        own_ways = found[str(m)] = {}
        for label, way in each.items():
            miss = missed(way(x, weight), wanted)
            seconds = product_seconds(lambda turn, x=x, way=way: way(x, copies[turn % len(copies)]))
            own_ways[label] = {"seconds": seconds, "miss": miss}
            print(f"    {matrix} int4 {m} rows {seconds * 1e6:8.1f} us  {label}  misses {miss:.2g}", flush=True)
    return found


def chain_layers() -> list[tuple[str, ChainWeights]]:
    """Generate layers of Llama 3.1 8B with the types of a file in Q4_K_M: half of them have V and down in Q6_K."""
    ones = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def part(name: str, outputs: int, inputs: int) -> BlockPart:
        return BlockPart(drawn(name, outputs, inputs, "cuda"), name, outputs)

    def layer(more: str) -> ChainWeights:
        (o, gate_up, down), kv = [MATRICES[name] for name in ("o", "gate_up", "down")], 1024
        qkv = (part("Q4_K", 4096 + kv, 4096), part(more, kv, 4096))
        return ChainWeights((part("Q4_K", *o),), (part("Q4_K", *gate_up),), (part(more, *down),), qkv,
                            (ones, ones), (1e-5, 1e-5))  # fmt: skip

    return [(more, layer(more)) for more in ("Q4_K", "Q6_K") * 2]


def measure_chain() -> dict[str, Any]:
    """Measure the microseconds of a layer, averaged over both kinds, beside the time for its bytes."""
    device = torch.device("cuda")
    kernel, alone, layers = gguf_chain.GGUFChain(device), gguf_row.GGUFRow(device), chain_layers()
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    moved = [sum(part.arranged.nbytes for matrix in own.matrices for part in matrix) for _, own in layers]
    floor = sum(moved) / len(moved) / RATES.bytes_per_second
    found: dict[str, Any] = {"floor_s": floor, "ways": {}, "misses": []}
    for _, own in layers[:2]:
        pairs = zip(kernel(x, x, own), gguf_chain.reference(x.double(), x.double(), own), strict=True)
        found["misses"].append([float((got.double() - want).norm() / want.norm()) for got, want in pairs])
    print(f"chain: floor {floor * 1e6:.1f} us, misses {found['misses']}", flush=True)

    def note(label: str, way: Callable[[int], Any]) -> None:
        seconds = product_seconds(way)
        found["ways"][label] = {"seconds": seconds}
        print(f"    {seconds * 1e6:8.1f} us {floor / seconds:5.0%}  {label}", flush=True)

    def apart(turn: int) -> None:
        own = layers[turn % len(layers)][1]
        gated = x.new_ones(1, 14336)
        for matrix, left in zip(own.matrices, (x, x, gated, x), strict=True):
            alone(left, matrix, gated=matrix is own.gate_up, dependent_launch=True)

    for stages in (2, 3):
        note(
            f"one launch, {stages} stages",
            lambda turn, stages=stages: kernel(x, x, layers[turn % 4][1], dependent_launch=True, stages=stages),
        )
    note("four launches", apart)
    for place, name in enumerate(("Q4_K", "Q6_K")):
        note(
            f"one launch, with {name} alone" if place == 0 else f"one launch, with {name} in down and V",
            lambda turn, place=place: kernel(x, x, layers[place + turn % 2 * 2][1], dependent_launch=True),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(each) for each in text.split(",")],
                        default=[1, 8, 16, 32, 64, 128, 256, 512])  # fmt: skip
    parser.add_argument("--types", default="Q4_K,Q6_K")
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--kernels", default="chain,rows,tiles", help="for one row, for few, for many, or several")
    parser.add_argument("--chain", action="store_true", help="four products in one launch alone")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "gguf_kernels.json")
    options = parser.parse_args()
    kept = Kept(options.out)
    if options.chain:
        kept.attempt("chain", measure_chain)
        return
    for name in options.types.split(","):
        for matrix in options.shapes.split(","):
            if name == "int4":
                kept.attempt(f"{matrix} {name}", lambda m=matrix: measure_int4(m, options.rows))
            else:
                kept.attempt(f"{matrix} {name}", lambda m=matrix, t=name: measure(m, t, options.rows, options.kernels))
            release()


if __name__ == "__main__":
    main()
