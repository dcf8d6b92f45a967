"""Compile every kernel for every target ahead of time, and record shared memory, registers and spills. No GPU.

    python benchmarks/checks/targets.py [--targets sm_89,sm_120] [--jobs 2] [--out FILE]

Triton's kernels are those that operators declare for a target, with the tilings launched there; CUDA C++ sources
go through nvcc. A target that is left out keeps its earlier result. Six minutes a target on 2 busy cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.hardware.targets import TARGETS
from transect.ops.lang.cuda_build import compile_source, find_nvcc, sources

OUT = record.RESULTS / "targets.json"
PART = "--part"


def triton_kernels(target: str, part: int, parts: int, only: str = "") -> Iterator[dict[str, Any]]:
    """Compile a share of the declared kernels, each in a process of its own, because a compiler may abort."""
    from transect.ops.registry import all_ops
    from transect.ops.tools.compile import compile_kernel

    declared = [(op.name, kernel) for op in all_ops() for kernel in op.kernels() if target in kernel.targets]
    declared = [(name, kernel) for name, kernel in declared if only in f"{name}, {kernel.name}"]
    for name, kernel in declared[part::parts]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                made = compile_kernel(kernel, target, sass=False)
                found: dict[str, Any] = {"shared": made.shared_bytes, "registers": made.registers}
                found |= {"spilled": made.spilled_bytes, "matrix": made.matrix_instructions}
            except BaseException as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        yield {"op": name, "kernel": kernel.name, **(json.loads(text) if text else {"error": "the compiler aborted"})}


def triton_share(target: str, part: int, parts: int, only: str) -> list[dict[str, Any]]:
    """Compile a share of the declared kernels in a process of their own; ``only`` those whose name contains it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "--targets", target, "--jobs", str(parts), "--only", only, PART, str(part)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def cuda_source(source: Path, target: str) -> dict[str, Any]:
    """Compile a CUDA C++ source."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = compile_source(source, target, Path(folder) / "out.cubin")
        except RuntimeError as error:
            return {"source": source.name, "error": str(error)[-300:]}
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", report)]
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", report)]
    found = {"source": source.name, "kernels": len(registers), "registers": max(registers, default=0)}
    return found | {"spilled": max(spilled, default=0)}


def faults(target: str, result: Mapping[str, Any]) -> list[str]:
    """List the kernels of a target that did not compile, spill, or need more shared memory than a block has."""
    limit = TARGETS[target].block_bytes
    found = []
    for row in (*result["triton"], *result["cuda"]):
        name = f"{row['op']}, {row['kernel']}" if "op" in row else row["source"]
        if "error" in row:
            found.append(f"{name}: {row['error']}")
        elif row["spilled"]:
            found.append(f"{name}: {row['spilled']} bytes spilled")
        elif row.get("shared", 0) > limit:
            found.append(f"{name}: {row['shared']} bytes of shared memory, of {limit}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", default="", help="Kernels whose name contains this; others keep their rows.")
    parser.add_argument("--no-cuda", action="store_true", help="Keep the earlier result of nvcc.")
    parser.add_argument(PART, type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        for row in triton_kernels(options.targets, options.part, options.jobs, options.only):
            print(json.dumps(row), flush=True)
        return
    result = json.loads(options.out.read_text()) if options.out.exists() else {"targets": {}}
    result["command"] = "python benchmarks/checks/targets.py"
    version = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True).stdout
    made = {"environment": record.environment(("triton",)), "nvcc": re.findall(r"release ([\d.]+)", version)[0]}
    targets, parts = options.targets.split(","), max(2, options.jobs // 2)
    with ThreadPoolExecutor(options.jobs) as pool:
        # Sources first, the longest of which takes as long as many kernels.
        jobs: dict[str, tuple[list[Future[Any]], list[Future[Any]]]] = {}
        largest = sorted(sources(), key=lambda source: -source.stat().st_size)
        for target in targets:
            there = largest if TARGETS[target].nvidia and not options.no_cuda else []
            jobs[target] = [pool.submit(cuda_source, source, target) for source in there], []
        for target, (_, shares) in jobs.items():
            shares += [pool.submit(triton_share, target, part, parts, options.only) for part in range(parts)]
        for target, (compiled, shares) in jobs.items():
            before = result["targets"].get(target, {})
            kept = before.get("triton", []) if options.only else []
            kept = [row for row in kept if options.only not in f"{row['op']}, {row['kernel']}"]
            rows = {**made, "triton": kept + [row for share in shares for row in share.result()]}
            cuda = [source.result() for source in compiled]
            rows["cuda"] = sorted(cuda, key=lambda row: row["source"]) if compiled else before.get("cuda", [])
            result["targets"][target] = rows
            record.write(options.out, result)
            print(f"{target}: {len(rows['triton'])} Triton kernels, {len(rows['cuda'])} CUDA C++ sources", flush=True)
            for fault in faults(target, rows):
                print(f"  {fault}", flush=True)


if __name__ == "__main__":
    main()
