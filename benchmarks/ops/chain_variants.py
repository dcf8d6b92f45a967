"""Four products of one row with blocks of GGUF files: the kernel, and it with parts changed or left out. Temporary."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import _paths  # noqa: F401
from benchmarks.engine.gpu import RATES
from benchmarks.formats.gpu import product_seconds
from benchmarks.ops.gguf_kernels import chain_layers
from transect.ops.lang import cuda_build
from transect.ops.linear.packed.gguf import gguf_chain, gguf_four

FOLDER = Path(gguf_four.__file__).parent
OUT = Path(sys.argv[1])
MAIN, HEADER = (FOLDER / "gguf_four.cu").read_text(), (FOLDER.parent / "chain.cuh").read_text()
OTHERS = ("kQ4_0", "kQ4_1", "kQ5_0", "kQ5_1", "kQ8_0", "kQ2_K", "kQ3_K", "kQ5_K", "kIQ4_NL", "kMXFP4")
FEW = [(f"TRANSECT_ADD({name})", "") for name in OTHERS]
NO_PRODUCTS = [*FEW, ("add_unit<F>(sums, from, x_at, lane);", "sums[0] += __uint_as_float(read4(from));")]
NO_WAITS = [
    ("if (!lacks_half(v[j])) missing &= ~(1u << j);", "missing = 0;"),
    ("if (lacks_float(v[e])) return;", ""),
]
NO_KEEP = [("const float back = Codes::keep(part, known, v.v, steps, lane);", "const float back = 1;")]
EIGHT = [("kWarps = 16", "kWarps = 8"), ("kMostSteps = 8, kKept", "kMostSteps = 16, kKept")]
EARLY = [("if (p == QKV) let_next_begin();", "if (p == ATTENDED) let_next_begin();")]
TWICE = [("__launch_bounds__(kThreads, 1)", "__launch_bounds__(kThreads, 2)")]
TWELVE = [("kWarps = 16", "kWarps = 12"), ("kMostSteps = 8, kKept", "kMostSteps = 12, kKept")]
HINT = [
    ("copy_bulk(to, from, bytes, barrier);", "copy_once(to, from, bytes, barrier);"),
    (
        "constexpr int kMostParts = 3;",
        """constexpr int kMostParts = 3;
__device__ __forceinline__ void copy_once(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kReadOnce)
      : "memory");
}""",
    ),
]
VARIANTS: dict[str, tuple[list[tuple[str, str]], int]] = {
    "four": ([], 16),
    "four_few_types": (FEW, 16),
    "four_no_products": (NO_PRODUCTS, 16),
    "four_no_waits": (FEW + NO_WAITS, 16),
    "four_copies": (NO_PRODUCTS + NO_WAITS + NO_KEEP, 16),
    "four_hint": (FEW + HINT, 16),
    "four_12_warps": (FEW + TWELVE, 12),
    "four_8_warps": (FEW + EIGHT, 8),
    "four_8_warps_twice": (FEW + EIGHT + TWICE, 8),
    "four_no_keep": (FEW + NO_KEEP, 16),
    "four_early": (FEW + EARLY, 16),
    "four_8_warps_twice_early": (FEW + EIGHT + TWICE + EARLY, 8),
}


def write(name: str) -> str:
    """Write a variant's source and header."""
    changes, _ = VARIANTS[name]
    source = f"{name}x"
    main, header = MAIN.replace("transect_gguf_four", f"transect_{source}"), HEADER
    for old, new in changes:
        assert (old in main) or (old in header), old
        main, header = main.replace(old, new), header.replace(old, new)
    (FOLDER.parent / f"{source}.cuh").write_text(header)
    (FOLDER / f"{source}.cu").write_text(main.replace("../chain.cuh", f"../{source}.cuh"))
    return source


def build(source: str) -> None:
    """Build one."""
    begun = time.perf_counter()
    cuda_build.build(source, "sm_90")
    print(f"{source}: built in {time.perf_counter() - begun:.1f} s", flush=True)


def gates(rows: int) -> dict[str, float]:
    """Measure the microseconds of gate with up and the gate at many rows: bfloat16, and 4 bits dequantized, with the
    gate in a launch of its own (before) and in the product's epilogue."""
    from transect.ops.linear import gate_up
    from transect.ops.linear.packed.gguf.gguf_matmul import dequantize, drawn
    from transect.ops.linear.packed.int4 import int4_matmul
    from transect.ops.linear.packed.int4.int4_packing import arrange_codes

    n, k = 28672, 4096
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(n, k // 128, device="cuda") + 0.1) * k**-0.5 / 4
    weight = arrange_codes(codes, scale, -7.5 * scale)
    blocks = drawn("Q4_K", n, k, "cuda")
    dense = int4_matmul.rebuild(weight, n, x.dtype, apart=True)
    plain, own = gate_up.best_launcher(), int4_matmul.gated_launcher()
    want = gate_up.gate_halves(int4_matmul.rebuilt(x, weight, n), turns=16)
    got = own(x, weight, n, dependent_launch=True)
    miss = float((got.float() - want.float()).norm() / want.float().norm())
    wide = dequantize(blocks, "Q4_K", n, k, x.dtype, apart=True)
    turns = dequantize(blocks, "Q4_K", n, k, x.dtype).unflatten(0, (-1, 2, 16)).transpose(0, 1).flatten(0, 2)
    same = float(torch.equal(wide, turns))
    del turns
    ways = {
        "bfloat16": lambda turn: plain(x, dense, dependent_launch=True),
        "int4, before": lambda turn: gate_up.gate_halves(int4_matmul.rebuilt(x, weight, n), turns=16),
        "int4": lambda turn: own(x, weight, n, dependent_launch=True),
        "int4, dequantized alone": lambda turn: int4_matmul.rebuild(weight, n, x.dtype, apart=True),
        "Q4_K, dequantized alone": lambda turn: dequantize(blocks, "Q4_K", n, k, x.dtype, apart=True),
    }
    found = {label: 1e6 * product_seconds(way, 4) for label, way in ways.items()}
    print(f"gate, {rows} rows: misses {miss:.2g}, Q4_K apart is {'equal' if same else 'WRONG'};",
          ", ".join(f"{label} {value:.0f}" for label, value in found.items()), flush=True)  # fmt: skip
    return found | {"miss": miss, "equal": same}


def main() -> None:
    layers = chain_layers()
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    moved = [sum(part.arranged.nbytes for matrix in own.matrices for part in matrix) for _, own in layers]
    floor = sum(moved) / len(moved) / RATES.bytes_per_second
    found: dict[str, object] = {"floor_s": floor, "ways": {}}
    wanted = [gguf_chain.reference(x.double(), x.double(), own) for _, own in layers[:2]]

    def note(label: str, chain: object, **how: object) -> None:
        try:
            misses = []
            for (_, own), want in zip(layers, wanted, strict=False):
                got = chain(x, x, own, dependent_launch=True, **how)  # type: ignore[operator]
                misses.append([float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)])
            seconds = product_seconds(lambda turn: chain(x, x, layers[turn % 4][1], dependent_launch=True, **how))
            plain = product_seconds(lambda turn: chain(x, x, layers[turn % 2 * 2][1], dependent_launch=True, **how))
            row = {"seconds": seconds, "q4_k_alone": plain, "misses": misses}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        found["ways"][label] = row  # type: ignore[index]
        OUT.write_text(json.dumps(found, indent=1))
        if "error" in row:
            print(f"    {label}: {row['error']}", flush=True)
        else:
            wrong = max(max(each) for each in misses)
            print(f"    {seconds * 1e6:7.1f} us {floor / seconds:5.0%} (Q4_K alone {plain * 1e6:.1f})  {label}  "
                  f"misses {wrong:.2g}", flush=True)  # fmt: skip

    print(f"floor {floor * 1e6:.1f} us", flush=True)
    before = gguf_chain.GGUFChain(torch.device("cuda"))
    sources = {name: write(name) for name in VARIANTS}  # all before any is built: a library's name tells all headers
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(build, [*sources.values(), "gguf_chain"]))
    note("before, 8 stages", before.chain)
    for name, source in sources.items():
        gguf_four.WARPS = VARIANTS[name][1]
        kernel = object.__new__(gguf_four.GGUFFour)
        super(gguf_four.GGUFFour, kernel).__init__(source, "pp", torch.device("cuda"))
        tried = set()
        for stages in (2, 3, 4, 5, 8):
            fits = gguf_four.fitting(layers[1][1].matrices, stages)
            if fits >= 2 and fits not in tried and (stages in (2, 3, 4) or "copies" not in name):
                tried.add(fits)
                note(f"{name}, {fits} stages", kernel, stages=stages)
    gguf_four.WARPS = 16
    note("before, 8 stages, again", before.chain)
    for rows in (1024, 8192):
        found[f"gate {rows}"] = gates(rows)
        OUT.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
