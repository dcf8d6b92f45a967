"""Memory for reading a trace of a gigabyte and more: `transect explain trace` on a file made for it.

    python benchmarks/explain/large_trace.py [--gigabytes 1.1] [--out ...]

The file has what torch's profiler writes: operators with shapes, calls of the driver, kernels. A process of its own
reads it, and the most memory that it held is recorded beside what it holds after importing everything. So is the time,
on a machine that may be busy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

READ = """
import json, resource, sys, time
import transect.explain.program.explain
from pathlib import Path
from transect.explain.program.trace_file import read_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
shares = []
trace = read_trace(Path(sys.argv[1]), shares.append)
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"events": trace.size_kept, "seconds": seconds, "before_bytes": 1024 * before,
                  "peak_bytes": 1024 * peak, "progress_calls": len(shares), "truncated": trace.truncated}))
"""


def write(path: Path, size: float) -> None:
    """Write a trace of ``size`` bytes: steps of an operator, its launch and its kernel."""
    shapes = {"Input Dims": [[4096, 4096], [4096, 14336]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        number = 0
        while file.tell() < size:
            lines = []
            for _ in range(1000):
                number += 1
                at = 50.0 * number
                name = f"aten::op{number % 300}"
                common = {"ph": "X", "pid": 1}
                tags = {"External id": number, "Record function id": 0, "Ev Idx": number, "Sequence number": number}
                each = [
                    {**common, "cat": "cpu_op", "name": name, "tid": 1, "ts": at, "dur": 20.0, "args": tags | shapes},
                    {**common, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": at + 5, "dur": 4.0,
                     "args": {"External id": number, "correlation": number, "cbid": 211}},
                    {**common, "cat": "kernel", "name": f"kernel_{number % 200}_bf16_" + "x" * 120, "tid": 7,
                     "ts": at + 10, "dur": 30.0, "args": {"External id": number, "correlation": number, "device": 0,
                     "grid": [132, 1, 1], "block": [256, 1, 1], "registers per thread": 168, "stream": 7}},
                ]  # fmt: skip
                lines += [json.dumps(event) for event in each]
            file.write(",\n".join(lines) + ",\n")
        file.write('{"ph": "i", "name": "end"}]}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.1)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "large_trace.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        began = time.perf_counter()
        write(path, options.gigabytes * 1e9)
        print(f"{path.stat().st_size:,} bytes written in {time.perf_counter() - began:.0f} s", flush=True)
        size = path.stat().st_size
        done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    command = f"python benchmarks/explain/large_trace.py --gigabytes {options.gigabytes:g}"
    record.write(options.out, {"command": command, "environment": record.environment(), "bytes": size, **found})


def table(result: dict[str, Any]) -> str:
    """Format one sentence."""
    more = result["peak_bytes"] - result["before_bytes"]
    return (
        f"A trace of {result['bytes'] / 1e9:.1f} GB with {result['events']:,} events was read in "
        f"{result['seconds']:.0f} s and at most {more / 1e6:.0f} MB more than the process held before "
        f"({more / result['events']:.0f} bytes an event). `{result['command']}` on "
        f"{result['environment']['processor']}, {record.made_at([result['environment']])}.\n"
    )


if __name__ == "__main__":
    main()
