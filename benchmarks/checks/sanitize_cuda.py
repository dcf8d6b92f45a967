"""Runs every CUDA C++ implementation of the registry on its small examples under compute-sanitizer.

Of the Hopper kernel for 17 to 256 rows, which has many ways to cut a product up, every cut with every way to share K;
of the kernel for fewer rows also products with a norm beside them. Of the kernels for 4-bit weights cuts that
fill a stage of their ring again. ``scaled8_chain.cu``, ``int4_chain.cu``, ``gguf_chain.cu`` and ``gguf_row.cu``
are not operators and are run too.

In ``int4_matmul.cu`` one lane of a warp arrives at a barrier for all, which racecheck does not follow, so it reports
races. So it also gets a build in which every lane arrives, and which is the same otherwise (TRANSECT_EVERY_LANE).

What racecheck makes of a ring that is filled again and again, as those of the kernels for 4-bit weights, is shown by
small kernels that do nothing else (``sanitizer_control.cu``): of CUDA's library alone, of our helpers, and with a true
race.

python benchmarks/checks/sanitize_cuda.py [OUT.json]      memcheck and racecheck; exit 1 where one finds something
python benchmarks/checks/sanitize_cuda.py --inside        the program that is watched
python benchmarks/checks/sanitize_cuda.py --every-lane    the 4-bit kernel for few rows, every lane arriving
python benchmarks/checks/sanitize_cuda.py --chains        four products in one launch alone
python benchmarks/checks/sanitize_cuda.py --control KIND  one of the small kernels
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.ops.lang import cuda_build
from transect.ops.linear.few_rows import cuda as small_matmul_cuda
from transect.ops.linear.few_rows import hopper as small_matmul_hopper
from transect.ops.linear.packed.eight_bit import scaled8_chain, scaled8_tiles
from transect.ops.linear.packed.gguf import gguf_chain, gguf_row
from transect.ops.linear.packed.gguf.gguf_matmul import drawn
from transect.ops.linear.packed.int4 import int4_chain, int4_hopper, int4_rows
from transect.ops.linear.packed.int4.int4_packing import arrange, arrange_codes, pack
from transect.ops.registry import Op, Unavailable, all_ops
from transect.ops.tools import accuracy

EXTRA = {
    "matmul": [{"x": (128, 32), "weight": (128, 32)}, {"x": (130, 36), "weight": (68, 36)}],
    "small_matmul": [{"x": (m, k), "weight": (n, k)} for m, n, k in ((1, 40, 264), (5, 130, 512), (32, 65, 1024))],
}
"""Further shapes, for kernels that take few of the examples."""
TOOLS = ("memcheck", "racecheck")
CONTROLS = {
    "bulk copies, by CUDA's library": (1, 1, 0, 0),
    "copies of 16 bytes, by CUDA's library": (1, 0, 0, 0),
    "bulk copies, by CUDA's library, one lane for its warp": (1, 1, 1, 0),
    "bulk copies": (0, 1, 0, 0),
    "copies of 16 bytes": (0, 0, 0, 0),
    "bulk copies, one lane for its warp": (0, 1, 1, 0),
    "bulk copies, with a race": (0, 1, 0, 1),
    "copies of 16 bytes, with a race": (0, 0, 0, 1),
}
"""Arguments of the launcher of ``sanitizer_control.cu``."""


def examples(op: Op) -> list[dict[str, Any]]:
    """List the operator's examples, and the further ones as random tensors."""
    more = [{key: torch.randn(shape) for key, shape in sizes.items()} for sizes in EXTRA.get(op.name, ())]
    return [*map(dict, op.examples()), *more]


def inside() -> int:
    """Run them all; returns how many took no example."""
    missed = 0
    for op in all_ops():
        for name, made in op.implementations.items():
            if made.backend != "cuda":
                continue
            call = made.load()
            dtype = getattr(torch, made.dtypes[0])
            mine = 0
            for example in examples(op):
                given = {key: accuracy.prepared(op, key, value, dtype, "cuda", 0) for key, value in example.items()}
                if made.refusal and made.refusal(**given):
                    continue
                call(**given)
                torch.cuda.synchronize()
                mine += 1
            print(f"{op.name} {name}: {mine} runs", flush=True)
            missed += mine == 0
    return missed


def tilings() -> int:
    """Run ``small_matmul_hopper.cu`` with every cut and way to share K that a GPU of 8 multiprocessors would be offered
    for a small product, twice in a row as dependent launches, and products beside a norm; returns how many were
    refused."""
    try:
        kernel, rows_kernel = small_matmul_hopper.HopperRows(), small_matmul_cuda.CudaRows()
    except Unavailable as reason:
        print(f"small_matmul_hopper tilings: {reason}")
        return 0
    taken = refused = 0
    n, k = 224, 328  # K is not a multiple of a chunk, nor N of most tiles

    def tensors(*shapes: tuple[int, int]) -> list[torch.Tensor]:
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    for m in (23, 64, 100, 200):
        for gated in (False, True):
            x, weight = tensors((m, k), (n * (1 + gated), k))
            offered = small_matmul_hopper.candidates(m, n, k, gated=gated, units=8)
            kinds = {
                (tiling.compiled, (tiling.ranks > 1) - (tiling.ranks < 0), tiling.ranks == 0): tiling
                for tiling in offered
            }
            for tiling in kinds.values():
                try:
                    for _ in range(2):
                        kernel(x, weight, tiling=tiling, dependent_launch=True)
                    torch.cuda.synchronize()
                    taken += 1
                except ValueError as reason:
                    print(reason)
                    refused += 1
    for m in (3, 16):
        x, inward, outward, residual, scale = tensors((m, k), (n + 32, k), (n, n + 32), (m, n + 32), (1, n + 32))
        add = small_matmul_cuda.Beside(residual=residual, scale=scale[0])
        for ranks in (1, 2):
            tiling = small_matmul_cuda.CudaTiling(2, 4, 2, 4, ranks)
            _, scaled, squares = rows_kernel.beside(x, inward, None, add, tiling=tiling, dependent_launch=True)
        assert scaled is not None
        after = small_matmul_cuda.Beside(squares=squares, eps=1e-5)
        rows_kernel.beside(scaled, outward, None, after, dependent_launch=True)
        rows_kernel.beside(scaled, outward, None, after, dependent_launch=True, gated=True)
        torch.cuda.synchronize()
        taken += 1
    print(f"small_matmul_hopper tilings: {taken} runs", flush=True)
    return refused


def int4_plans(*, rows_only: bool = False) -> None:
    """Run the kernels for 4-bit weights, or the one for few rows, with K so long that their rings are filled again,
    each twice in a row as dependent launches."""
    try:
        rows_kernel, kernel = int4_rows.CudaCodes(), None if rows_only else int4_hopper.HopperCodes()
    except Unavailable as reason:
        print(f"int4_matmul tilings: {reason}")
        return
    taken = 0
    for m, group in ((3, 128), (13, 64), (13, 128), (30, 128)):
        n, k = 6000, 4096
        wide = 8 < m <= 16 and group == 128  # a warp may have three sixteens of rows of W
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        scale = torch.rand(n, k // group, device="cuda") / k
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        weight = arrange(pack(codes, group), scale, -7.5 * scale)
        for ranks in (1, 4):
            for teams in (1, 2):
                config = {"ranks": ranks, "teams": teams, "blocks": 1}
                for _ in range(2):
                    for whole in (False, True)[: 1 + (m <= 8)]:
                        told = config | {"warps": 12 // teams, "late": 4, "whole": whole, "columns": 2}
                        rows_kernel(x, weight, n, dependent_launch=True, config=told)
                    if wide:
                        told = config | {"warps": 6 // teams, "late": 4, "whole": False, "columns": 3}
                        rows_kernel(x, weight, n, dependent_launch=True, config=told)
                    if kernel:
                        kernel(
                            x,
                            weight,
                            n,
                            dependent_launch=True,
                            config=config | {"warps": 4, "columns": 2, "beside": True},
                        )
                torch.cuda.synchronize()
                taken += 1 + (m <= 8) + wide + (kernel is not None)
    print(f"int4_matmul tilings: {taken} runs", flush=True)


def chains() -> None:
    """Run ``scaled8_chain.cu``, ``int4_chain.cu``, ``gguf_chain.cu`` and ``gguf_row.cu`` with few and many stages, some
    filled again, twice in a row as dependent launches."""
    try:
        eight, four = scaled8_chain.CudaChain(), int4_chain.Int4Chain()
        blocks, alone = gguf_chain.GGUFChain(), gguf_row.GGUFRow()
    except Unavailable as reason:
        print(f"chains: {reason}")
        return
    taken = 0
    for d, q, f, n, biased in ((256, 512, 256, 128, True), (256, 256, 2048, 384, False)):
        shapes = ((d, q), (2 * f, d), (d, f), (n, d))
        attended, residual, first, second, bias = (
            torch.randn(1, size, device="cuda", dtype=torch.bfloat16) for size in (q, d, d, d, n)
        )
        norms, eps, added = (first[0], second[0]), (1e-5, 1e-6), bias[0] if biased else None
        o, gate_up, down, qkv = (
            scaled8_chain.Matrix8(*scaled8_tiles.rounded(torch.randn(shape, device="cuda") / shape[1] ** 0.5, True))
            for shape in shapes
        )
        weights = scaled8_chain.ChainWeights(o, gate_up, down, qkv, norms, eps, added)
        for _ in range(2):
            eight(attended, residual, weights, dependent_launch=True)
        torch.cuda.synchronize()
        taken += 1
        for group, stages in ((128, 4), (64, 3), (32, 2)):
            packed = weights._replace(
                **{
                    name: int4_chain.Matrix4(
                        arrange_codes(
                            torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8),
                            *torch.rand(2, shape[0], shape[1] // group, device="cuda"),
                        ),
                        shape[0],
                    )
                    for name, shape in zip(("o", "gate_up", "down", "qkv"), shapes, strict=True)
                }
            )
            for _ in range(2):
                four(attended, residual, packed, dependent_launch=True, stages=stages)
            torch.cuda.synchronize()
            taken += 1
        for names in (("Q4_K", "Q4_K", "Q6_K", "Q4_K"), ("Q8_0", "Q5_K", "Q4_0", "Q3_K")):
            out, gates, back, heads = (
                (gguf_row.BlockPart(drawn(name, *shape, "cuda"), name, shape[0]),)
                for name, shape in zip(names, shapes, strict=True)
            )
            stored = gguf_chain.ChainWeights(out, gates, back, heads, norms, eps, added)
            for stages in (5, 2):
                for _ in range(2):
                    blocks(attended, residual, stored, dependent_launch=True, stages=stages)
                    alone(attended, out, dependent_launch=True, stages=stages)
                torch.cuda.synchronize()
                taken += 1
    print(f"chains: {taken} runs", flush=True)


def every_lane() -> None:
    """Run ``int4_matmul.cu`` built so that every lane of a warp arrives at its barriers."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(shutil.copytree(cuda_build.SOURCES, Path(folder) / "ops"))
        source = sources / "linear" / "packed" / "int4" / "int4_matmul.cu"
        source.write_text("#define TRANSECT_EVERY_LANE\n" + source.read_text())
        with patch.object(cuda_build, "SOURCES", sources):
            int4_plans(rows_only=True)


def control(kind: str) -> int:
    """Run one of the kernels of ``sanitizer_control.cu``; 1 if what it read is not what lay there."""
    rounds = 32
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "control.so"
        cuda_build.compile_library(Path(__file__).with_name("sanitizer_control.cu"), "sm_90", built)
        library = ctypes.CDLL(str(built))
    numbers = torch.arange(rounds * 128, dtype=torch.int32, device="cuda")
    found = torch.zeros_like(numbers)
    pointers = [ctypes.c_void_p(each) for each in (numbers.data_ptr(), found.data_ptr())]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if library.transect_ring_control(*pointers, rounds, *CONTROLS[kind], stream):
        raise RuntimeError("the kernel could not be launched")
    torch.cuda.synchronize()
    return 0 if CONTROLS[kind][-1] or torch.equal(numbers, found) else 1


def watch(sanitizer: str, tool: str, *arguments: str) -> subprocess.Popen[str]:
    """Start this file with these arguments under a tool of the sanitizer."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def findings(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Return a tool's findings when it is done: a summary to record, and the full text."""
    text, _ = process.communicate()
    lines = text.splitlines()
    races = Counter(re.findall(r"Race reported between \w+ access at (?:void )?([^(]+<[^>]*>|\w+)", text))
    summary = next((line.strip("= ") for line in lines if "SUMMARY" in line), "")
    return {"exit": process.returncode, "summary": summary, "races": races}, text


def main() -> int:
    if "--inside" in sys.argv:
        int4_plans()
        chains()
        return 1 if inside() + tilings() else 0
    if "--chains" in sys.argv:
        chains()
        return 0
    if "--every-lane" in sys.argv:
        every_lane()
        return 0
    if "--control" in sys.argv:
        return control(sys.argv[-1])
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH: install the CUDA toolkit", file=sys.stderr)
        return 2
    running = {tool: watch(sanitizer, tool, "--inside") for tool in TOOLS}
    running["racecheck, every lane arriving"] = watch(sanitizer, "racecheck", "--every-lane")
    started = {kind: watch(sanitizer, "racecheck", "--control", kind) for kind in CONTROLS}
    controls = {kind: findings(process)[0] for kind, process in started.items()}
    for kind, said in controls.items():
        print(f"control, {kind}: exit {said['exit']}, {said['summary']}", flush=True)
    found = {}
    for tool, process in running.items():
        found[tool], text = findings(process)
        found[tool]["runs"] = [line for line in text.splitlines() if line.endswith(" runs")]
        print(f"{tool}: exit {process.returncode}\n{text[-3000:]}", flush=True)
    if sys.argv[1:]:
        result = {
            "command": "python benchmarks/checks/sanitize_cuda.py",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": record.environment(("torch",)),
            "device": torch.cuda.get_device_name(),
            "tools": found,
            "controls": controls,
        }
        record.write(Path(sys.argv[1]), result)
    return 1 if any(process.returncode for process in running.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
