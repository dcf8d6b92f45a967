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
from concurrent.futures import ThreadPoolExecutor
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


def all_triton_kernels(target: str, jobs: int, only: str) -> list[dict[str, Any]]:
    """Compile all declared kernels in ``jobs`` processes; ``only`` those whose name contains it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def share(part: int) -> list[dict[str, Any]]:
        command = [sys.executable, __file__, "--targets", target, "--jobs", str(jobs), "--only", only, PART, str(part)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(share, range(jobs)) for row in rows]


def cuda_sources(target: str, jobs: int) -> list[dict[str, Any]]:
    """Compile every CUDA C++ source."""

    def one(source: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                report = compile_source(source, target, Path(folder) / "out.cubin")
            except RuntimeError as error:
                return {"source": source.name, "error": str(error)[-300:]}
        spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", report)]
        registers = [int(found) for found in re.findall(r"Used (\d+) registers", report)]
        found = {"source": source.name, "kernels": len(registers), "registers": max(registers, default=0)}
        return found | {"spilled": max(spilled, default=0)}

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, sources()))


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
    result["environment"] = record.environment(("triton",))
    version = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True).stdout
    result["nvcc"] = re.findall(r"release ([\d.]+)", version)[0]
    for target in options.targets.split(","):
        before = result["targets"].get(target, {})
        made = all_triton_kernels(target, options.jobs, options.only)
        if options.only:
            kept = [row for row in before.get("triton", []) if options.only not in f"{row['op']}, {row['kernel']}"]
            made = kept + made
        rows = {"triton": made, "cuda": before.get("cuda", [])}
        if TARGETS[target].nvidia and not options.no_cuda:
            rows["cuda"] = cuda_sources(target, options.jobs)
        result["targets"][target] = rows
        record.write(options.out, result)
        print(f"{target}: {len(rows['triton'])} Triton kernels, {len(rows['cuda'])} CUDA C++ sources", flush=True)
        for fault in faults(target, rows):
            print(f"  {fault}", flush=True)


if __name__ == "__main__":
    main()
