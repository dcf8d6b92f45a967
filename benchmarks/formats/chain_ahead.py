"""Decode at one row with more and fewer weights asked for ahead of the next chain. Temporary."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import _paths  # noqa: F401
from benchmarks.engine.gpu import Kept, engine, prompts, release
from benchmarks.formats.gpu import FORMATS, decode, hold_in_blocks
from transect.bench.offline import decode_steps
from transect.ops.linear.packed.eight_bit import scaled8_chain
from transect.ops.linear.packed.gguf import gguf_chain
from transect.ops.linear.packed.int4 import int4_chain

KINDS = {"int4": int4_chain.Int4Chain, "fp8": scaled8_chain.CudaChain, "q4_k_m": gguf_chain.GGUFChain}
AHEAD = {"q4_k_m": (4, 0, 6, 8, 2, 12), "int4": (4, 0, 6, 8), "fp8": (3, 0, 2, 5)}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--formats", default="q4_k_m,int4,fp8")
parser.add_argument("--out", type=Path)
options = parser.parse_args()
model, kept = "llama-3.1-8b", Kept(options.out)
for name in options.formats.split(","):
    if name == "q4_k_m":
        hold_in_blocks(name, model)
    for ahead in AHEAD[name]:
        began = time.perf_counter()
        KINDS[name].__call__.__kwdefaults__["beyond"] = ahead
        llm = engine(model, **FORMATS[name])
        decode_steps(llm, prompts(4, 99), 8, 32)
        print(f"{name}, {ahead} ahead, built in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        kept.attempt(f"{name} {ahead} ahead", lambda n=name, m=llm: decode(m, n, model, 1, 255, 2))
        del llm
        release()
