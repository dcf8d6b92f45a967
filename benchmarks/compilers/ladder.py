"""A ladder of operators by compilers: torch eager, torch.compile, JAX under jit, TVM for the product, and this project.

    python benchmarks/compilers/ladder.py [--rounds 5] [--tuning 128] [--jax PYTHON] [--tvm PYTHON]
    python benchmarks/compilers/ladder.py --device cuda --jax python3 --tuning 0 --out RESULTS

Each peer is one file of ``benchmarks/peers`` and runs in a process of its own, by the interpreter that has its
packages: ``--jax`` and ``--tvm`` name those of environments made with

    python -m venv /tmp/peers-jax && /tmp/peers-jax/bin/pip install jax
    python -m venv /tmp/peers-tvm && /tmp/peers-tvm/bin/pip install apache-tvm \
        apache-tvm-ffi==0.1.14.post0 xgboost-cpu psutil cloudpickle tornado   # a newer ffi crashes 0.27's search

Every result is compared with float64 before it is timed. All peers keep the memory that they free: glibc would hand
results of 32 MiB back to the system, and the page faults of the next one would take longer than the operator. The peers
take turns, ``--rounds`` times at each rung; a time is the median over rounds. The floor of a rung is the larger of its
FLOPs at the rate of multiply-adds and its bytes at the read bandwidth, both measured on this machine in this run.
``--ladder small`` is a quick check of all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.compilers.operators import LADDERS, Work

PEERS = {
    "torch_eager": "torch, eager",
    "torch_inductor": "torch.compile, max-autotune",
    "jax_xla": "JAX, jit",
    "tvm_tuned": "TVM, tuned",
    "transect_operators": "Transect",
}
HERE = Path(__file__).parent
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Settings of glibc, by which a process keeps the memory that it frees."""


class Worker:
    """A peer in its own process; see ``worker.py``."""

    def __init__(self, peer: str, python: str, options: argparse.Namespace) -> None:
        command = [python, str(HERE / "worker.py"), peer, "--ladder", options.ladder, "--device", options.device]
        command += ["--threads", str(options.threads), "--tuning", str(options.tuning)]
        threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self.log = (options.logs / f"{peer}.log").open("w")
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
                env={**os.environ, **threads, **KEPT},
            )  # fmt: skip
            self.hello = self._answer()
        except OSError as error:
            self.hello = {"failed": f"{python}: {error.strerror}"}

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command, and return the answer; a peer that died answers ``failed``."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return {"failed": "the process died"}
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": "the process died"}

    def end(self) -> None:
        """Close its input, at which it ends."""
        if "failed" not in self.hello:
            self.process.communicate()
        self.log.close()


def rates(options: argparse.Namespace) -> dict[str, float]:
    """Measure FLOP/s and bytes per second of the device."""
    import torch

    from transect.hardware.device import detect
    from transect.ops.cpu.ceilings import device_measurement

    torch.set_num_threads(options.threads)
    ceilings = device_measurement(detect(options.device), again=True).ceilings
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    return {"flops_per_second": ceilings.rate(dtype), "bytes_per_second": ceilings.read_bytes_per_second}


def rung(index: int, work: Work, workers: dict[str, Worker], options: argparse.Namespace) -> dict[str, Any]:
    """Measure one rung by all peers."""
    found: dict[str, dict[str, Any]] = {}
    for name, worker in workers.items():
        found[name] = worker.ask(make=index)
    racing = [name for name, answer in found.items() if "error" in answer]
    times: dict[str, list[float]] = {name: [] for name in racing}
    for _ in range(options.rounds):
        for name in racing:
            answer = workers[name].ask(time=options.seconds)
            times[name].append(statistics.median(answer.get("seconds", [float("inf")])))
    for name, seconds in times.items():
        found[name]["seconds"] = record.summary(seconds)
        workers[name].ask(drop=1)
    flops, nbytes = work.cost()
    return {"work": work.label, "dtype": work.dtype, "flops": flops, "bytes": nbytes, "peers": found}


def table(result: dict[str, Any]) -> str:
    """Format milliseconds of every peer, with the share of the floor; the fastest in bold."""
    names = [name for name in result["peers"] if "failed" not in result["peers"][name]]
    lines = ["| operator | dtype | floor, ms | " + " | ".join(PEERS[name] for name in names) + " |"]
    lines.append("|---|---|---|" + "---|" * len(names))
    notes: dict[str, None] = {}
    for row in result["rungs"]:
        least = floor_s(row, result["rates"])
        known = {name: each["seconds"]["median"] for name, each in row["peers"].items() if "seconds" in each}
        cells = []
        for name in names:
            each = row["peers"][name]
            if name not in known:
                notes[f"{PEERS[name]}: {each.get('lacks') or each.get('failed')}"] = None
                cells.append("")
                continue
            text = f"{known[name] * 1e3:.3g} ({least / known[name]:.0%})"
            cells.append(f"**{text}**" if known[name] == min(known.values()) else text)
            if each["note"]:
                notes[f"{PEERS[name]}: {each['note']}"] = None
        lines.append(f"| {row['work']} | {row['dtype']} | {least * 1e3:.3g} | " + " | ".join(cells) + " |")
    for name, hello in result["peers"].items():
        if "failed" in hello:
            notes[f"{PEERS[name]} did not run: {hello['failed']}"] = None
    versions = {key: value for each in result["peers"].values() for key, value in each.get("versions", {}).items()}
    machine, measured = result["environment"], result["rates"]
    where = result.get("gpu") or f"{result['threads']} cores of an {machine['processor']}"
    lines += ["", *(f"* {note}" for note in notes), ""]
    lines.append(
        f"`{result['command']}` on {where} ({measured['flops_per_second'] / 1e9:,.0f} GFLOP/s, "
        f"{measured['bytes_per_second'] / 1e9:,.1f} GB/s), {', '.join(f'{k} {v}' for k, v in versions.items())}, "
        f"{record.made_at([machine])}, medians of {result['rounds']} rounds in turns; in brackets the share of the "
        "floor."
    )
    return "\n".join(lines) + "\n"


def floor_s(row: dict[str, Any], measured: dict[str, float]) -> float:
    """Return the floor of a rung in seconds: the longer of its arithmetic and its memory traffic."""
    return max(row["flops"] / measured["flops_per_second"], row["bytes"] / measured["bytes_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ladder", choices=LADDERS, help="default: that of the device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn at a rung")
    parser.add_argument("--tuning", type=int, default=64, help="trials of TVM's search; 0 leaves TVM out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", default=",".join(PEERS), help="names of files of benchmarks/peers")
    parser.add_argument("--only", help="an operator's name: leave out the others")
    parser.add_argument("--jax", default="/tmp/peers-jax/bin/python", metavar="PYTHON")
    parser.add_argument("--tvm", default="/tmp/peers-tvm/bin/python", metavar="PYTHON")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="folder for the peers' own output")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.ladder = options.ladder or options.device
    options.out = options.out or record.RESULTS / ("cpu" if options.device == "cpu" else "h100") / "compilers.json"
    pythons = {"jax_xla": options.jax, "tvm_tuned": options.tvm}
    begun = time.perf_counter()
    measured = rates(options)
    workers = {name: Worker(name, pythons.get(name, sys.executable), options) for name in options.peers.split(",")}
    result: dict[str, Any] = {
        "command": record.command("benchmarks/compilers/ladder.py"),
        "environment": record.environment(("torch", "numpy")),
        "threads": options.threads,
        "rounds": options.rounds,
        "rates": measured,
        "peers": {name: worker.hello for name, worker in workers.items()},
        "rungs": [],
    }
    if options.device == "cuda":
        import torch

        result["gpu"] = torch.cuda.get_device_name()
    ready = {name: worker for name, worker in workers.items() if "failed" not in worker.hello}
    for index, work in enumerate(LADDERS[options.ladder]):
        if options.only not in (None, work.operator):
            continue
        result["rungs"].append(rung(index, work, ready, options))
        row = result["rungs"][-1]["peers"]
        shown = {n: f"{e['seconds']['median'] * 1e3:.3f} ms" if "seconds" in e else e for n, e in row.items()}
        print(f"{time.perf_counter() - begun:5.0f} s  {work.label} {work.dtype}: {shown}", file=sys.stderr, flush=True)
        record.write(options.out, result)
    for worker in workers.values():
        worker.end()
    result["seconds"] = time.perf_counter() - begun
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
