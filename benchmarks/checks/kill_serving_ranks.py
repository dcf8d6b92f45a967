"""Kills a rank of a server on two at random moments under load: every client gets one clean end, and nothing is left.

    python benchmarks/checks/kill_serving_ranks.py [--kills 10] [--rank 1] [--device cuda] [--seed 20] [--add FILE ...]
        [--out FILE]

Each time a server (``transect serve --tensor-parallel-size 2``, random weights) is restarted, which shows that a
restart works after the kill before. Clients ask for long answers, half of them as streams; meanwhile the second rank
(or, with ``--rank 0``, the first, which is the engine's process) is killed with SIGKILL. Then each client must have
one end (an answer or one error), ``/health`` be red, the server exit with 1 by itself and say one error, no process
of its family be left, and on GPUs no memory be held. Writes benchmarks/results/cpu/kill_serving_ranks.json, or what
``--out`` says; with ``--add`` also the kills that other files have (``--kills 0``: those alone).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

sys.path.insert(0, str(record.ROOT / "examples" / "pretrain"))

import httpx
from byte_model import Shape, write_model

SHAPE = Shape(dim=256, layers=4, heads=4, ffn=512, context=1024)
CLIENTS, ANSWER, PATIENCE_S = 6, 900, 60.0


def end_of(url: str, stream: bool) -> str:
    """Follow a request to its end for the client: ``done``, or the code of its one error; more than one end is an
    error."""
    body = {"model": "m", "prompt": "hello", "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": stream}, timeout=PATIENCE_S) as response:
        if not stream or response.status_code != 200:
            found = json.loads(response.read())
            return found["error"]["code"] if "error" in found else "done"
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    values = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [value["error"]["code"] for value in values if "error" in value]
    finished = [c for value in values for c in value.get("choices", ()) if c["finish_reason"]]
    assert len(errors) + bool(finished) == 1, f"{len(errors)} errors and {len(finished)} ends"
    assert not errors or "error" in values[-1], "something comes after the error"
    return errors[0] if errors else "done"


def children(pid: int) -> list[int]:
    """List all descendants of a process."""
    found, todo = [], [pid]
    while todo:
        each = todo.pop()
        try:
            own = Path(f"/proc/{each}/task/{each}/children").read_text().split()
        except OSError:
            continue
        found += map(int, own)
        todo += map(int, own)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pids: list[int], within: float) -> list[int]:
    """Return the processes that still live after a while."""
    until = time.monotonic() + within
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def gpu_memory() -> list[int]:
    """List the MiB in use on each GPU that this process sees; empty without GPUs."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        done = subprocess.run([*command, *(["-i", seen] if seen else [])], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [int(line) for line in done.stdout.split()]


def one_kill(model: Path, device: str, rank: int, delay: float) -> dict[str, Any]:
    """Start a server, load it, kill one of its two ranks; what came of it."""
    before = gpu_memory()
    command = [sys.executable, "-m", "transect", "serve", str(model), "--port", "0", "--served-model-name", "m"]
    command += ["--tensor-parallel-size", "2", "--load-format", "dummy", "--device", device, "--threads", "1"]
    command += ["--max-num-seqs", "16", "--kv-cache-tokens", "16384"]
    paths = [str(record.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    began = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None and server.stderr is not None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(server.stderr or ()), daemon=True)
    reader.start()
    try:
        ready = server.stdout.readline()
        assert " ready on " in ready, "".join(said)
        started = time.monotonic() - began
        url, family = ready.split(" ready on ")[1].split()[0], children(server.pid)
        module = "transect.parallel.rank" if rank else "transect.engine.frontends.process"
        ranks = [pid for pid in family if module in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(ranks) == 1, ranks
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
            answers = [clients.submit(end_of, url, bool(i % 2)) for i in range(CLIENTS)]
            time.sleep(delay)
            os.kill(ranks[0], signal.SIGKILL)
            killed = time.monotonic()
            found = [answer.result(PATIENCE_S) for answer in answers]
            told = time.monotonic() - killed
            try:
                red = httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 503
            except httpx.HTTPError:
                red = True  # it has ended meanwhile
        code = server.wait(PATIENCE_S)
        left = ends(family, PATIENCE_S)
        reader.join(5)
    finally:
        server.kill()
        server.wait()
    errors = sum("transect: error:" in line for line in said)
    after = gpu_memory()
    until = time.monotonic() + 10
    while any(b > a + 64 for a, b in zip(before, after, strict=True)) and time.monotonic() < until:
        time.sleep(0.5)
        after = gpu_memory()
    result: dict[str, Any] = {
        "rank": rank,
        "ends": {kind: found.count(kind) for kind in sorted(set(found))},
        "told_after_s": round(told, 3),
        "health_red": red,
        "exit_code": code,
        "errors_said": errors,
        "processes_left": len(left),
        "gpu_mib_more": [b - a for a, b in zip(before, after, strict=True)],
        "started_in_s": round(started, 1),
        "killed_after_s": round(delay, 3),
    }
    result["clean"] = (
        set(found) <= {"done", "engine_dead"} and red and code == 1 and errors == 1 and not left
        and all(more <= 64 for more in result["gpu_mib_more"])
    )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rank", type=int, choices=[0, 1], default=1, help="which is killed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=20, help="of the moments")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further kill begins then")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="results whose kills count too")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "kill_serving_ranks.json")
    options = parser.parse_args()
    moments, begun = random.Random(options.seed), time.monotonic()
    before = [json.loads(path.read_text()) for path in options.add]
    found: list[dict[str, Any]] = [kill for each in before for kill in each["each"]]
    made = [run for each in before for run in each["runs"]]
    if before and not options.kills:
        record.write(options.out, summed(options.device, found, made))
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), SHAPE)
        for _ in range(options.kills):
            if time.monotonic() - begun > options.seconds:
                break
            found.append(one_kill(Path(name), options.device, options.rank, moments.uniform(0.0, 1.0)))
            print(found[-1], flush=True)
            record.write(options.out, summed(options.device, found, [*made, record.environment()]))


def summed(device: str, found: list[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize kills, with the machines and commits of their runs."""
    return {
        "command": f"python benchmarks/checks/kill_serving_ranks.py --device {device}",
        "kills": len(found),
        "clean": sum(each["clean"] for each in found),
        "clients": CLIENTS * len(found),
        "clients_with_one_error": sum(each["ends"].get("engine_dead", 0) for each in found),
        "slowest_told_s": max(each["told_after_s"] for each in found),
        "each": found,
        "runs": runs,
    }


if __name__ == "__main__":
    main()
