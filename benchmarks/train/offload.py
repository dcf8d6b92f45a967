"""Training with the optimizer's states in host memory and on a disk: tokens per second beside the slowest part's floor.

    python benchmarks/train/offload.py OUT.json --part adamw|states|memory|disk [--model llama-3.1-8b]
        [--limit 60GB] [--accumulate 1] [--delayed] [--all] [--folder /tmp/states] [--steps 5] [--seconds 60]
        [--smallest]

``adamw``: the C++ kernel beside torch's fused AdamW on the processor, for several numbers of threads, and the rate at
which memory is copied.

``states``: AdamW over states in a file alone, without a model: bytes per second beside the disk's rate in the same run.

``memory``: full training of a model with random weights, in mixed precision, on one GPU held to ``--limit``, with
float32 weights and both moments in host memory. ``disk``: the same with these in a file, of the first of ``--model``
(with commas between) that the disk has time for. With ``--all`` the weights to compute with are there too, and come
layer by layer. Every step is split into what ends with the norm of the gradients (GPU, and gradients to the host),
and the processor's step with weights going back.

Floors of a step, each from what this machine showed in this run: the GPU by useful FLOPs at 750 TFLOP/s, each direction
of the link by 2 bytes a number, AdamW by 28 bytes a number at the best rate that this process moved host memory, the
disk by 12 bytes a number each way. The *sequential* floor adds what cannot overlap: the processor begins when the last
gradient is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

GPU_FLOPS = 750e12
ADAMW_BYTES, LINK_BYTES, DISK_BYTES = 28, 2, 12
"""For each number of the model: AdamW with gradient and new weight in bfloat16; one way over the link; one way to or
from a disk."""


def best(f: Callable[[], object], times: int = 5) -> float:
    """Return the shortest of some runs, in seconds."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        f()
        found.append(time.perf_counter() - begin)
    return min(found)


def cores() -> int:
    return len(os.sched_getaffinity(0))


# The kernel


def adamw(numbers: int, teams: list[int]) -> list[dict[str, Any]]:
    """Measure numbers per second of the kernel and of torch's fused AdamW, and bytes per second of copies, by
    threads."""
    import torch

    from transect.hardware.host_memory import host_tensor
    from transect.ops.cpu.adamw import HostStep, corrections, host_kernels

    w, m, v, wide = host_tensor((4, numbers), torch.float32)
    gradient, out = host_tensor((2, numbers), torch.bfloat16)
    for tensor in (w, m, v, wide):
        tensor.fill_(0.01)
    gradient.fill_(0.01)
    step = HostStep(1e-4, 0.9, 0.95, 1e-8, *corrections(0.9, 0.95, 9))
    ninth = torch.tensor(9.0)
    found = []
    for threads in teams:
        torch.set_num_threads(threads)
        kernels = host_kernels(threads)

        def fused() -> None:
            torch._fused_adamw_(
                [w], [wide], [m], [v], [], [ninth], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip

        ours = best(lambda: kernels.step(gradient, w, m, v, out, step, 0.1))  # noqa: B023
        theirs = best(fused)
        rounding = best(lambda: out.copy_(w))
        copy = best(lambda: wide.copy_(w))
        found.append(
            {
                "threads": threads,
                "kernel": str(kernels),
                "numbers": numbers,
                "numbers_per_second": numbers / ours,
                "bytes_per_second": ADAMW_BYTES * numbers / ours,
                "torch_fused_numbers_per_second": numbers / theirs,
                "torch_fused_and_rounding_numbers_per_second": numbers / (theirs + rounding),
                "copy_bytes_per_second": 8 * numbers / copy,
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def link(nbytes: int = 2**28) -> dict[str, float]:
    """Measure bytes per second between pinned memory and the GPU, each way."""
    import torch

    from transect.hardware.host_memory import host_memory

    host, device = host_memory(nbytes, pin=True), torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def move(to: Any, source: Any) -> None:
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return {
        "to_host": nbytes / best(lambda: move(host, device)),
        "to_device": nbytes / best(lambda: move(device, host)),
    }


def disk(folder: str, nbytes: int) -> dict[str, Any]:
    """Measure bytes per second of a file as large as there is time for: written, read, and both at once, as a step
    does."""
    from transect.hardware.direct_file import DirectFile
    from transect.hardware.host_memory import host_memory

    Path(folder).mkdir(parents=True, exist_ok=True)
    file = DirectFile(Path(folder) / "rate", nbytes, temporary=True)
    part = 256 * 2**20
    buffers = [host_memory(part) for _ in range(4)]
    places = range(0, nbytes - part + 1, part)

    def run(read: bool, write: bool) -> float:
        begin = time.perf_counter()
        pending = []
        for turn, at in enumerate(places):
            if len(pending) > 3:
                pending.pop(0).wait()
            if read:
                pending.append(file.read(at, buffers[turn % 2]))
            if write:
                pending.append(file.write(places[turn - 1] if read and turn else at, buffers[2 + turn % 2]))
        for each in pending:
            each.wait()
        return time.perf_counter() - begin

    moved = len(places) * part
    write, read, both = run(False, True), run(True, False), run(True, True)
    file.close()
    return {
        "bytes": moved,
        "direct": file.direct,
        "write": moved / write,
        "read": moved / read,
        "both": 2 * moved / both,
    }


def states(folder: str, numbers: int) -> dict[str, Any]:
    """Measure AdamW steps over states in a file, each with the rate of the disk just before it."""
    import torch

    from transect.ops.cpu.adamw import HostStep, corrections, host_kernels
    from transect.parallel.offload.groups import GROUP
    from transect.parallel.offload.states import DiskStates

    kept = DiskStates(folder, {"first": numbers // 2, "second": numbers // 2}, 3)
    kernels = host_kernels(cores())
    step = HostStep(1e-4, 0.9, 0.95, 1e-8, *corrections(0.9, 0.95, 9))
    gradient, out = torch.zeros(2, GROUP, dtype=torch.bfloat16)
    rows = []
    for _ in range(6):
        rate = disk(folder, 2**31)
        begin = time.perf_counter()
        for group, three in kept.walk(range(len(kept.groups))):
            for piece in group.pieces:
                count = piece.end - piece.begin
                w, m, v = (three[kind][piece.place] for kind in range(3))
                kernels.step(gradient[:count], w, m, v, out[:count], step, 0.1)
        kept.settle()
        moved = 2 * DISK_BYTES * numbers / (time.perf_counter() - begin)
        rows.append({"bytes_per_second": moved, "disk": rate, "share": moved / rate["both"]})
        print(json.dumps(rows[-1]), flush=True)
    return {"numbers": numbers, "kernel": str(kernels), "rows": rows[1:]}


# A run


def configuration(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    from benchmarks.train.parallel import random_tokens, smallest_model, text

    tokens = 64 if given.smallest else 4096
    parallel: dict[str, Any] = {
        "offload": "all" if given.all else "optimizer",
        "delayed_update": given.delayed,
        "tiles": given.tiles,
    }
    if given.part == "disk":
        parallel["offload_path"] = given.folder
    return {
        "model": smallest_model(folder) if given.smallest else given.model,
        "load_format": "auto" if given.smallest else "dummy",
        "task": "finetune" if given.smallest else "pretrain",
        "steps": 10**6,
        "accumulate": given.accumulate,
        "precision": "mixed",
        "checkpointing": "full" if given.all else "auto",
        "memory": "" if given.smallest else given.limit,
        "device": "cpu" if given.smallest else "cuda",
        "data": {
            "train": [text(folder) if given.smallest else random_tokens(folder, tokens)],
            "seq_len": tokens,
            "micro_batch": tokens * 2,
        },
        "optimizer": {"learning_rate": 1e-5, "clip": 1.0},
        "parallel": parallel,
    }


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Run the steps of a run, each split in two."""
    import torch

    from transect.costs.units import parse_bytes
    from transect.train.config import TrainConfig
    from transect.train.loop.trainer import Trainer
    from transect.train.optim.offloaded import OffloadedAdamW

    gpu = not given.smallest
    wait: Callable[[], object] = torch.cuda.synchronize if gpu else (lambda: None)
    if gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(given.limit) / total))
    rates: dict[str, Any] = {"link": link() if gpu else None}
    rates["adamw"] = adamw(2**20 if given.smallest else 2**27, [cores()])
    if given.part == "disk":
        rates["disk"] = disk(given.folder, 2**30 if given.smallest else 2**31)
        given.model = affordable(given.model.split(","), rates["disk"]["both"], given.seconds)
    print(json.dumps(rates), flush=True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(TrainConfig.from_dict(configuration(given, folder)))
        optimizer = trainer.optimizer
        assert isinstance(optimizer, OffloadedAdamW)
        wait()
        built = time.perf_counter() - begin
        print(f"built in {built:.1f} s; {trainer.memory.why}; {optimizer.kernels}", flush=True)
        marks: list[float] = []
        gradients, stepping = trainer.crew.strategy.gradients, optimizer.step

        def to_the_norm(*args: Any) -> Any:
            found = gradients(*args)
            wait()
            marks.append(time.perf_counter())
            return found

        def the_step(*args: Any) -> None:
            stepping(*args)
            marks.append(time.perf_counter())

        trainer.crew.strategy.gradients = to_the_norm  # type: ignore[method-assign]
        optimizer.step = the_step  # type: ignore[method-assign]
        numbers = sum(p.numel() for p in trainer.trainable.parameters.values())
        steps = []
        for _ in range(given.steps + 1):
            marks.clear()
            start = time.perf_counter()
            record = trainer.step()
            wait()
            end = time.perf_counter()
            steps.append(
                {
                    "seconds": end - start,
                    "to_the_norm": marks[0] - start,
                    "adamw": marks[1] - marks[0],
                    "tail": end - marks[1],
                    "loss": record.loss,
                    "flops": record.flops,
                    "tokens": record.tokens,
                    "micro_batches": given.accumulate,
                }
            )
            print(json.dumps(steps[-1]), flush=True)
            if time.perf_counter() - begin > given.seconds and len(steps) > 1:
                break
    return {
        "part": given.part,
        "model": "the smallest" if given.smallest else given.model,
        "numbers": numbers,
        "state_bytes": optimizer.state_bytes(),
        "limit": given.limit,
        "accumulate": given.accumulate,
        "delayed": given.delayed,
        "all": given.all,
        "tiles": given.tiles,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0,
        "predicted_bytes": trainer.memory.estimate.peak,
        "build_seconds": built,
        "rates": rates,
        "steps": steps,
        **beside_floors(numbers, steps[1:], rates, gpu, given.delayed, given.all),
    }


def affordable(models: list[str], rate: float, seconds: float) -> str:
    """Return the first of the models whose states a disk of this rate moves four times in this time, or the last
    one."""
    import math

    from transect.spec.shapes import PRESETS
    from transect.spec.weights import weight_shapes

    for model in models:
        numbers = sum(math.prod(shape) for shape in weight_shapes(PRESETS[model]).values())
        if 4 * 2 * DISK_BYTES * numbers / rate < seconds:
            return model
    return models[-1]


def beside_floors(
    numbers: int, steps: list[dict[str, Any]], rates: dict[str, Any], gpu: bool, delayed: bool, everything: bool
) -> dict[str, Any]:
    """Return the median step, and the floor of each part."""
    kernel = rates["adamw"][0]
    memory = max(kernel["bytes_per_second"], kernel["copy_bytes_per_second"])
    floors = {"adamw": ADAMW_BYTES * numbers / memory}
    given_times = steps[0]["micro_batches"]
    if gpu:
        floors["gpu"] = steps[0]["flops"] / GPU_FLOPS
        floors["gradients to the host"] = given_times * LINK_BYTES * numbers / rates["link"]["to_host"]
        times = 2 * given_times if everything else 1  # up through the layers, and down again
        floors["weights to the device"] = times * LINK_BYTES * numbers / rates["link"]["to_device"]
    before = ["gpu", "gradients to the host", *(["weights to the device", "disk, weights"] if everything else [])]
    if "disk" in rates:
        floors["disk"] = (2 * DISK_BYTES + (LINK_BYTES if everything else 0)) * numbers / rates["disk"]["both"]
        if everything:
            floors["disk, weights"] = 2 * given_times * LINK_BYTES * numbers / rates["disk"]["read"]
    first = max(floors.get(name, 0.0) for name in before)
    second = max(floors[name] for name in floors if name not in before)
    seconds = statistics.median(step["seconds"] for step in steps)
    tokens = steps[0]["tokens"]
    slowest = max(floors, key=lambda name: floors[name])
    found = {
        "step_seconds": {
            "median": seconds,
            "min": min(step["seconds"] for step in steps),
            "max": max(step["seconds"] for step in steps),
            "runs": len(steps),
        },
        "tokens_per_second": tokens / seconds,
        "floors": floors,
        "slowest": slowest,
        "share_of_slowest_floor": floors[slowest] / seconds,
        "sequential_floor": first + second,
        "share_of_sequential_floor": (first + second) / seconds,
    }
    if delayed:  # nothing is sequential but the weights
        found["sequential_floor"] = max(first, second) + floors.get("weights to the device", 0.0)
        found["share_of_sequential_floor"] = found["sequential_floor"] / seconds
    if "disk" in rates:
        in_step = statistics.median(step["adamw"] + step["tail"] for step in steps)
        found["disk_bytes_per_second"] = (2 * DISK_BYTES + (LINK_BYTES if everything else 0)) * numbers / in_step
        found["share_of_disk_rate"] = found["disk_bytes_per_second"] / rates["disk"]["both"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", choices=["adamw", "states", "memory", "disk"], required=True)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--limit", default="60GB")
    parser.add_argument("--folder", default="/tmp/transect-states")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of 2 x 4096 tokens to a step")
    parser.add_argument("--delayed", action="store_true", help="steps beside the next one (delayed_update)")
    parser.add_argument("--all", action="store_true", help="weights too, layer by layer")
    parser.add_argument("--tiles", type=int, default=1, help="with --all: parts that each matrix comes in")
    parser.add_argument("--smallest", action="store_true", help="a rehearsal on a CPU")
    given = parser.parse_args()
    from benchmarks.record import commit, environment, write

    about = {"environment": environment(), "commit": commit()}
    if given.part == "adamw":
        teams = sorted({1, *(n for n in (2, 4, 8, 16, 32, 64) if n < cores()), cores()})
        result: dict[str, Any] = {"part": "adamw", "rows": adamw(2**20 if given.smallest else 2**27, teams)}
    elif given.part == "states":
        result = {"part": "states", **states(given.folder, 2**20 if given.smallest else 400_000_000)}
    else:
        result = train(given)
    write(given.out, about | result)
    shown = {key: value for key, value in result.items() if key not in ("steps", "rows")}
    print(json.dumps(shown, indent=1), flush=True)


if __name__ == "__main__":
    main()
