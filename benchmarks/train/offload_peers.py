"""DeepSpeed's ZeRO beside this project's training on one GPU, with states, and weights, in host memory.

    python benchmarks/train/offload_peers.py [--model llama-3.2-1b] [--rounds 2] [--steps 5] [--out FILE]
    DS_ACCELERATOR=cpu python benchmarks/train/offload_peers.py --smallest --out FILE   # a rehearsal on a CPU

Full training with random weights on 2 x 4096 random tokens a step: bfloat16 with float32 master weights, AdamW,
gradients clipped at norm 1. Three ways: everything on the GPU, the optimizer's states in host memory, weights too. Each
contender of each way is built in a process of its own; the order changes from round to round. A step's time is that
until the device is idle; the first two steps are not counted. DeepSpeed compiles its AdamW for the processor when first
used, which needs ninja and a C++ compiler, and has transformers' model with Liger-Kernel.

With llama-3.2-1b a process takes 25 to 40 s on an H100, all of two rounds about 6 minutes. Needs 40 GB of host memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

SEQUENCE, ROWS, WARMING = 4096, 2, 2
WAYS = {
    "none": "everything on the GPU",
    "optimizer": "states in host memory",
    "all": "states and weights in host memory",
}
CONTENDERS = {"transect": "Transect", "deepspeed": "DeepSpeed"}
STAGES = {"none": "ZeRO 1", "optimizer": "ZeRO 2", "all": "ZeRO 3"}


def tiny() -> dict[str, Any]:
    """Return the config.json of a model that a CPU trains in no time."""
    return {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip


def transect_step(given: argparse.Namespace, way: str, folder: str) -> Callable[[], float]:
    """Build our trainer, and return its step; the step returns the loss."""
    from benchmarks.train.parallel import random_tokens, smallest_model, text
    from transect.train.config import TrainConfig
    from transect.train.loop.trainer import Trainer

    tokens = 64 if given.smallest else SEQUENCE
    configuration = {
        "model": smallest_model(folder) if given.smallest else given.model,
        "load_format": "auto" if given.smallest else "dummy",
        "task": "finetune" if given.smallest else "pretrain",
        "steps": 10**6,
        "precision": "mixed",
        "device": "cpu" if given.smallest else "cuda",
        "data": {
            "train": [text(folder) if given.smallest else random_tokens(folder, tokens)],
            "seq_len": tokens,
            "micro_batch": tokens * ROWS,
        },
        "optimizer": {"learning_rate": 1e-5, "clip": 1.0},
        "parallel": {"offload": way},
    }
    trainer = Trainer(TrainConfig.from_dict(configuration))
    return lambda: trainer.step().loss


def deepspeed_step(given: argparse.Namespace, way: str) -> Callable[[], float]:
    """Build DeepSpeed's engine, and return its step; the step returns the loss."""
    from benchmarks.peers.deepspeed_zero import zero
    from benchmarks.train.gpu import config_of

    values, device = (tiny(), "cpu") if given.smallest else (config_of(given.model), "cuda")
    step = zero(values, way, ROWS, 64 if given.smallest else SEQUENCE, device)
    return lambda: float(step())


def measure(given: argparse.Namespace) -> None:
    """Time one contender's way in this process, and print the result as a line of JSON."""
    import torch

    contender, way = given.one.split()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        step = transect_step(given, way, folder) if contender == "transect" else deepspeed_step(given, way)
        wait: Callable[[], object] = (lambda: None) if given.smallest else torch.cuda.synchronize
        wait()
        built = time.perf_counter() - begun
        seconds, losses = [], []
        for _ in range(WARMING + given.steps):
            start = time.perf_counter()
            losses.append(step())
            wait()
            seconds.append(time.perf_counter() - start)
    names = ("deepspeed", "liger-kernel", "transformers") if contender == "deepspeed" else ()
    versions = {name: metadata.version(name) for name in names if not (given.smallest and name == "liger-kernel")}
    found = {
        "seconds": seconds[WARMING:],
        "losses": losses,
        "built": built,
        "peak_bytes": 0 if given.smallest else torch.cuda.max_memory_allocated(),
        "versions": versions,
    }
    print(json.dumps(found), flush=True)


def run(contender: str, way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own; ``failed`` with the end of its errors if it ends otherwise."""
    command = [sys.executable, __file__, "--one", f"{contender} {way}", "--model", given.model]
    command += ["--steps", str(given.steps), *(["--smallest"] if given.smallest else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=given.timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {given.timeout:.0f} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"ended with {done.returncode}"]
        print("\n".join(said[-12:]), file=sys.stderr, flush=True)
        return {"failed": said[-1].strip()[:200]}
    return json.loads(done.stdout.splitlines()[-1])


def table(result: dict[str, Any]) -> str:
    """Format tokens per second and memory of the ways by both."""
    lines = ["| state | | tok/s | step, s (min to max) | GPU memory |", "|---|---|---|---|---|"]
    notes: dict[str, None] = {}
    tokens = result["tokens"]
    for way, told in WAYS.items():
        for contender, name in CONTENDERS.items():
            found = [each[f"{contender} {way}"] for each in result["rounds"] if f"{contender} {way}" in each]
            right = [each for each in found if "seconds" in each]
            stage = f", {STAGES[way]}" if contender == "deepspeed" else ""
            notes |= {f"{name}, {told}: {each['failed']}": None for each in found if "failed" in each}
            if right:
                step = record.summary([seconds for each in right for seconds in each["seconds"]])
                memory = max(each["peak_bytes"] for each in right) / 1e9
                lines.append(
                    f"| {told} | {name}{stage} | {tokens / step['median']:,.0f} | {step['median']:.3f} "
                    f"({step['min']:.3f} to {step['max']:.3f}) | {memory:.1f} GB |"
                )
    versions = {k: v for one in result["rounds"] for each in one.values() for k, v in each.get("versions", {}).items()}
    machine = result["environment"]
    lines += ["", *(f"* {note}" for note in notes), *([""] if notes else [])]
    lines.append(
        f"`{result['command']}` on one {result['gpu']}, {machine['cores']} cores of an {machine['processor']}, torch "
        f"{machine['packages']['torch']}, {', '.join(f'{name} {version}' for name, version in versions.items())}, "
        f"{record.made_at([machine])}: {result['model']} with random weights, {tokens:,} tokens a step, medians over "
        f"{len(result['rounds'])} rounds in turns."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a preset's name")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--timeout", type=float, default=180, help="seconds of one process")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no process is started")
    parser.add_argument("--smallest", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--one", metavar="CONTENDER WAY", help="measure this one in this process")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h100" / "offload_peers.json")
    given = parser.parse_args()
    if given.one:
        return measure(given)
    import torch

    begun = time.perf_counter()
    gpu = "" if given.smallest else torch.cuda.get_device_name()
    result: dict[str, Any] = {
        "command": record.command("benchmarks/train/offload_peers.py"),
        "environment": record.environment(("torch",)),
        "gpu": gpu,
        "model": given.model,
        "tokens": ROWS * (64 if given.smallest else SEQUENCE),
        "rounds": [],
    }
    order = [(who, way) for way in given.ways.split(",") for who in given.contenders.split(",")]
    for number in range(given.rounds):
        found: dict[str, Any] = {}
        result["rounds"].append(found)
        for who, way in order if number % 2 == 0 else reversed(order):
            if time.perf_counter() - begun > given.limit:
                continue
            found[f"{who} {way}"] = one = run(who, way, given)
            middle = f"{statistics.median(one['seconds']):.3f} s" if "seconds" in one else one["failed"]
            print(f"{time.perf_counter() - begun:5.0f} s  {who} {way}: {middle}", file=sys.stderr, flush=True)
            record.write(given.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
