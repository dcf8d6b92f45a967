"""Chains of one row with more and fewer weights asked for ahead: alone, and in a decode step. Temporary."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks.engine.gpu import RATES, Kept, engine, prompts, release
from benchmarks.formats.gpu import FORMATS, SHAPES, decode, hold_in_blocks, product_seconds
from transect.bench.offline import decode_steps
from transect.ops.linear.packed.chain import ChainWeights
from transect.ops.linear.packed.eight_bit import scaled8_chain, scaled8_tiles
from transect.ops.linear.packed.gguf import gguf_chain
from transect.ops.linear.packed.int4 import int4_chain
from transect.ops.linear.packed.int4.int4_packing import arrange_codes

KINDS = {"int4": int4_chain.Int4Chain, "fp8": scaled8_chain.CudaChain, "q4_k_m": gguf_chain.GGUFChain}
AHEAD = {"q4_k_m": (4, 0, 8, 6, 12), "int4": (4, 0, 8), "fp8": (3, 0, 5)}


def int4(shape: tuple[int, int]) -> Any:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda")
    scale = (torch.rand(shape[0], shape[1] // 128, device="cuda") + 0.1) * shape[1] ** -0.5 / 4
    return int4_chain.Matrix4(arrange_codes(codes, scale, -7.5 * scale), shape[0])


def fp8(shape: tuple[int, int]) -> Any:
    return scaled8_chain.Matrix8(*scaled8_tiles.rounded(torch.randn(shape, device="cuda") / shape[1] ** 0.5, True))


def alone(name: str) -> dict[str, Any]:
    """Microseconds of a layer's chain, with layers in turn, and how far the result misses."""
    module: Any = int4_chain if name == "int4" else scaled8_chain
    make, kernel = {"int4": int4, "fp8": fp8}[name], KINDS[name](torch.device("cuda"))
    ones = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    shapes = [SHAPES[each] for each in ("o", "gate_up", "down", "qkv")]
    layers = [ChainWeights(*map(make, shapes), (ones, ones), (1e-5, 1e-5)) for _ in range(4)]
    layers = [own._replace(ahead=(layers[i - 3].o, layers[i - 3].gate_up)) for i, own in enumerate(layers)]
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    moved = sum(m.arranged.nbytes if name == "int4" else m.codes.nbytes for m in layers[0].matrices)
    found: dict[str, Any] = {"floor_us": moved / RATES.bytes_per_second * 1e6}
    wanted = module.reference(x.double(), x.double(), layers[0])
    for stages in (2, 3) if name == "int4" else (2,):
        for beyond, together in ((0, 1), (0, 4), (0, 8), (2, 4), (4, 4), (6, 4), (8, 4), (4, 1)):
            how = {"stages": stages, "beyond": beyond, "together": together}
            got = kernel(x, x, layers[0], dependent_launch=True, **how)
            miss = max(float((g.double() - w).norm() / w.norm()) for g, w in zip(got, wanted, strict=True))
            seconds = product_seconds(
                lambda turn, how=how: kernel(x, x, layers[turn % 4], dependent_launch=True, **how)
            )
            found[str(how)] = {"us": seconds * 1e6, "miss": miss}
            print(f"  {name} {seconds * 1e6:6.1f} us of {found['floor_us']:.1f}  {how}  misses {miss:.2g}", flush=True)
    return found


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--formats", default="q4_k_m")
parser.add_argument("--out", type=Path)
options = parser.parse_args()
model, kept = "llama-3.1-8b", Kept(options.out)
for name in options.formats.split(","):
    if name == "q4_k_m":
        hold_in_blocks(name, model)
    else:
        kept.attempt(f"{name} alone", lambda n=name: alone(n))
        release()
    for ahead in AHEAD[name]:
        began = time.perf_counter()
        KINDS[name].__call__.__kwdefaults__["beyond"] = ahead
        llm = engine(model, **FORMATS[name])
        decode_steps(llm, prompts(4, 99), 8, 32)
        print(f"{name}, {ahead} ahead, built in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        kept.attempt(f"{name} {ahead} ahead", lambda n=name, m=llm: decode(m, n, model, 1, 255, 2))
        del llm
        release()
