"""Training on one GPU beside transformers, Liger-Kernel and PEFT: tokens per second, MFU and peak memory.

    python benchmarks/train/gpu.py OUT.json [--only NAME,...] [--without CONTENDER,...] [--seconds 8]

Each contender runs in a process of its own on random tokens, 2 x 4096 a step: bfloat16 weights and optimizer state,
AdamW (fused), no gradient clipping. Random weights of the true shapes. Only ours checkpoints activations, in
QLoRA, which is told to stay within 24 GB and chooses for itself. Of mixtures of experts transformers multiplies by
``grouped_mm``; ``liger`` puts its own kernel for experts in the place of that, ``liger grouped`` leaves it. A step's
time is that between two events on the GPU; the host may be one step ahead, and no peer is made to read its loss in
each step (ours does, and stops if it is not finite). Processes warm up side by side. When all have, they are timed one
at a time, in turns of a second or so, every second round in the opposite order: a GPU that was idle runs the first at a
better clock. One that torch.compile takes a minute for compiles meanwhile, on cores of its own, and joins when it is
ready. transformers alone, which needs much memory, comes after the others.

Then the account of memory that the trainer makes before it builds anything is compared with the allocator's peak, for
the other plans of checkpointing at these shapes.
Contenders that need a package that is not installed are listed with the reason.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks.engine.popular_shapes import SHAPES
from benchmarks.peers.training import one_gpu

ROOT = Path(__file__).resolve().parents[2]

SEQUENCE, ROWS = 4096, 2
WORK = {
    "full 1b": ("llama-3.2-1b", "pretrain"),
    "full qwen3 0.6b": ("qwen3-0.6b", "pretrain"),
    "full qwen2.5 1.5b": ("qwen2.5-1.5b", "pretrain"),
    "full 3b": ("llama-3.2-3b", "pretrain"),
    "full qwen3 moe": ("qwen3-30b-a3b, 8 layers", "pretrain"),
    "lora 8b": ("llama-3.1-8b", "lora"),
    "lora qwen2.5 7b": ("qwen2.5-7b", "lora"),
    "qlora 8b": ("llama-3.1-8b", "qlora"),
}
CONTENDERS = {
    "full 1b": ("transect", "transformers", "liger", "liger compiled"),
    "full qwen3 0.6b": ("transect", "liger", "liger compiled"),
    "full qwen2.5 1.5b": ("transect", "liger", "liger compiled"),
    "full 3b": ("transect", "liger", "liger compiled"),
    "full qwen3 moe": ("transect", "transformers", "liger", "liger grouped", "liger grouped compiled"),
    "lora 8b": ("transect", "liger", "liger compiled"),
    "lora qwen2.5 7b": ("transect", "liger", "liger compiled"),
    "qlora 8b": ("transect",),
}
LIMIT = {"qlora 8b": "24GB"}
"""Memory limit of a run of ours."""
OTHERS = 6
"""Cores of those that do not compile."""
ROUNDS = 4
"""Turns in which a contender's steps are timed."""
LAST = ("transformers",)
"""Timed alone, after the others."""
PLANS = {"full 1b": ("selective", "full"), "lora 8b": ("selective", "full"), "qlora 8b": ("none", "full")}
"""Plans of checkpointing whose memory is compared with the account, beside those of the race."""
PEAK_RATE = 750e12
"""FLOP/s that the MFU is a share of: what an H200 sustains in bfloat16."""


def config_of(shape: str) -> dict[str, Any]:
    """Return the config.json of a preset, or of one of ``popular_shapes``; of its first layers alone if the shape says
    so."""
    from dataclasses import replace

    from transect.spec.hf import to_hf
    from transect.spec.shapes import PRESETS

    name, _, layers = shape.partition(", ")
    if name not in PRESETS:
        return SHAPES[name].config()
    config = PRESETS[name]
    return to_hf(replace(config, n_layers=int(layers.split()[0])) if layers else config)


def source_of(shape: str) -> str:
    """Return the trainer's name of the model: a preset's name, or a folder with a config.json."""
    from transect.spec.shapes import PRESETS

    if shape in PRESETS:
        return shape
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    return str(folder)


def trainer(work: str, **changes: Any) -> Any:
    """Build our trainer on random tokens."""
    import numpy as np

    from transect.train.config import TrainConfig
    from transect.train.data.tokens import token_dtype, write_meta
    from transect.train.loop.trainer import Trainer

    shape, task = WORK[work]
    folder = Path(tempfile.mkdtemp()) / "random.tokens"
    folder.mkdir()
    count = 40 * SEQUENCE * ROWS
    tokens = np.random.default_rng(0).integers(0, 10000, count).astype(token_dtype(128256))
    tokens.tofile(folder / "tokens.bin")
    np.arange(SEQUENCE, count + 1, SEQUENCE, dtype=np.uint64).tofile(folder / "ends.bin")
    write_meta(folder, count, count // SEQUENCE, 128256, "none")
    config = {
        "model": source_of(shape),
        "load_format": "dummy",
        "task": task,
        "steps": 10**6,
        "precision": "bfloat16",
        "memory": LIMIT.get(work, ""),
        "data": {"train": [str(folder)], "seq_len": SEQUENCE, "micro_batch": SEQUENCE * ROWS},
        "optimizer": {"learning_rate": 1e-5, "clip": 0.0},
        "lora": {"rank": 16},
        **changes,
    }
    return Trainer(TrainConfig.from_dict(config))


WARMING, PAUSE = -1, 0.003
"""Value in place of the rounds of one that is not ready yet; seconds between two looks at the file."""


class Turns:
    """Order of timing: a file, which all processes lock to look at.

    It has the rounds of everyone who takes part, in order of entry, and who is timed now. No one is timed while
    one that takes part warms up. A process without a file never waits.
    """

    def __init__(self, path: str, name: str = "") -> None:
        self.path, self.name = path, name

    @classmethod
    def begin(cls, path: Path, names: list[str]) -> str:
        """Create a new file, in which these warm up; returns its path."""
        path.write_text(json.dumps({"rounds": dict.fromkeys(names, WARMING), "timed": ""}))
        return str(path)

    @contextmanager
    def _seen(self) -> Iterator[dict[str, Any]]:
        """Yield the file's content; changes to it are written back."""
        with open(self.path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            yield state
            file.seek(0)
            file.truncate()
            json.dump(state, file)

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Round ``number`` of this process, when it is its turn."""
        while self.path:
            with self._seen() as state:
                state["rounds"][self.name] = number
                if not state["timed"] and next_of(state["rounds"]) == self.name:
                    state["timed"] = self.name
                    break
            time.sleep(PAUSE)
        yield
        if self.path:
            with self._seen() as state:
                state["timed"] = ""

    def leave(self) -> None:
        """Remove this one, so that no other waits for it."""
        if self.path:
            with self._seen() as state:
                state["rounds"].pop(self.name, None)
                state["timed"] = "" if state["timed"] == self.name else state["timed"]


def name_of(work: str, contender: str) -> str:
    """Return a contender's name in a file of turns."""
    return f"{work}, {contender}"


def next_of(rounds: dict[str, int]) -> str:
    """Return the next one to run: of those with the fewest rounds the first, in odd rounds the last; empty while one
    warms up."""
    least = min(rounds.values())
    if least == WARMING:
        return ""
    waiting = [name for name, count in rounds.items() if count == least]
    return waiting[-(least % 2)]


def measure(work: str, contender: str, seconds: float, path: str) -> dict[str, Any]:
    """Measure in this process: warm up, then time steps for a while, some whenever it is its turn."""
    compiled, turns = "compiled" in contender, Turns(path, name_of(work, contender))
    cores = sorted(os.sched_getaffinity(0))
    if path and len(cores) > 2 * OTHERS:
        os.sched_setaffinity(0, cores[OTHERS:] if compiled else cores[:OTHERS])
    import torch

    begin = time.perf_counter()
    facts: dict[str, Any] = {}
    if contender == "transect":
        ours = trainer(work)
        facts["checkpointing"] = ours.memory.checkpointing
        facts["layers_without"] = ours.memory.whole
        facts["predicted_bytes"] = ours.memory.estimate.peak
        facts["worst"] = ours.memory.estimate.worst.name

        def step() -> Any:
            return ours.step().loss
    else:
        shape, task = WORK[work]
        step = one_gpu(
            config_of(shape), task, ROWS, SEQUENCE,
            liger="liger" in contender, compiled="compiled" in contender, grouped="grouped" in contender,
        )  # fmt: skip
    torch.cuda.synchronize()
    built = time.perf_counter() - begin
    for _ in range(4):
        loss = step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - begin - built
    times: list[float] = []
    for number in range(ROUNDS):
        with turns.turn(number):
            step()  # again at the clock of a GPU at work
            marks = [torch.cuda.Event(enable_timing=True)]
            marks[0].record()
            end = time.perf_counter() + seconds / ROUNDS
            while len(marks) < 3 or (time.perf_counter() < end and len(marks) < 40):
                loss = step()
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                marks[-2].synchronize()
            torch.cuda.synchronize()
        times += [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    turns.leave()
    median = statistics.median(times)
    return {
        "work": work,
        "contender": contender,
        "tokens_per_second": SEQUENCE * ROWS / median,
        "step_seconds": {"median": median, "min": min(times), "max": max(times), "runs": len(times)},
        "mfu": useful_flops(*WORK[work]) / median / PEAK_RATE,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "build_seconds": built,
        "warm_up_seconds": warm,
        "last_loss": float(loss),
        **facts,
    }


def memory(work: str) -> list[dict[str, Any]]:
    """Measure in this process, for each plan, the trainer's account and the allocator's peak over 2 steps."""
    import torch

    rows = []
    for plan in PLANS[work]:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours = trainer(work, checkpointing=plan, memory="")
        for _ in range(2):
            ours.step()
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated() - before
        estimate = ours.memory.estimate
        rows.append(
            {
                "work": work,
                "checkpointing": plan,
                "predicted_bytes": estimate.peak,
                "measured_bytes": measured,
                "ratio": estimate.peak / measured,
                "worst": estimate.worst.name,
            }
        )
        del ours
    return rows


def useful_flops(shape: str, task: str) -> float:
    """Compute the FLOPs of a step."""
    from transect.costs.training import flops_per_token
    from transect.spec.hf import from_hf

    return SEQUENCE * ROWS * flops_per_token(from_hf(config_of(shape)), SEQUENCE, frozen=task != "pretrain")


def profile(work: str, out: str) -> None:
    """Write a table of the GPU's time in a step of ours."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    ours = trainer(work)
    for _ in range(3):
        ours.step()
    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        ours.step()
    Path(out).write_text(found.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="", help="contenders that do not race")
    parser.add_argument("--no-memory", action="store_true", help="leave out the comparison with the account of memory")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--memory", default="", help="compare the account for this work alone")
    parser.add_argument("--profile", default="")
    parser.add_argument("--turns", default="", help="a file by which processes take turns")
    arguments = parser.parse_args()
    if arguments.profile:
        profile(arguments.profile, str(arguments.out))
        return
    if arguments.one:
        work, contender = arguments.one
        arguments.out.write_text(json.dumps(measure(work, contender, arguments.seconds, arguments.turns)))
        return
    if arguments.memory:
        arguments.out.write_text(json.dumps(memory(arguments.memory)))
        return
    chosen = arguments.only.split(",") if arguments.only else list(WORK)
    race(arguments.out, chosen, arguments.seconds, arguments.without.split(","), memory=not arguments.no_memory)


def race(out: Path, chosen: list[str], seconds: float, without: list[str], *, memory: bool) -> None:
    """Run all contenders, then the accounts of memory; the file is rewritten after each result."""
    import torch

    from transect.hardware.environment import environment

    pairs = [(work, contender) for work in chosen for contender in CONTENDERS[work] if contender not in without]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    accounts: list[dict[str, Any]] = []

    def save() -> None:
        result = {
            "command": "python benchmarks/train/gpu.py OUT.json",
            "method": "each contender in its own process, 2 x 4096 random tokens a step, bfloat16 weights and AdamW "
            "state, timed in turns; medians of the time between two steps' events on the GPU; MFU by useful FLOPs "
            "at 750 TFLOP/s",
            "rows": [rows[pair] for pair in pairs if pair in rows],
            "memory": accounts,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "environment": environment(("torch", "triton", "transformers", "peft", "liger-kernel")),
        }
        out.write_text(json.dumps(result, indent=1) + "\n")

    def run(pair: tuple[str, str], path: str = "") -> tuple[tuple[str, str], tuple[Any, list[str]]]:
        answer = in_process("--seconds", str(seconds), "--turns", path, "--one", *pair)
        Turns(path, name_of(*pair)).leave()  # it may have failed before its turn
        return pair, answer

    def enter(pair: tuple[str, str], answer: tuple[Any, list[str]]) -> None:
        found, reason = answer
        rows[pair] = found or {"work": pair[0], "contender": pair[1], "error": reason}
        print({k: v for k, v in rows[pair].items() if k != "step_seconds"}, flush=True)
        save()

    for work in chosen:
        beside = [pair for pair in pairs if pair[0] == work and pair[1] not in LAST]
        soon = [name_of(*pair) for pair in beside if "compiled" not in pair[1]]
        path = Turns.begin(Path(tempfile.mkdtemp()) / "turns", soon)
        with ThreadPoolExecutor(8) as pool:
            for done in as_completed([pool.submit(run, pair, path) for pair in beside]):
                enter(*done.result())
        for pair in pairs:
            if pair[0] == work and pair[1] in LAST:
                enter(*run(pair))
        if work in PLANS and memory:
            found, reason = in_process("--memory", work)
            accounts += [{"work": work, "error": reason}] if found is None else found
            print(found or reason, flush=True)
            save()


def in_process(*arguments: str) -> tuple[Any, list[str]]:
    """Run this file with these arguments in a process of its own; returns its result, or None and the last line of its
    error."""
    part = Path(tempfile.mkdtemp()) / "part.json"
    done = subprocess.run(
        [sys.executable, __file__, str(part), *arguments], capture_output=True, text=True, timeout=400
    )
    if part.exists():
        return json.loads(part.read_text()), []
    print(done.stderr[-3000:], file=sys.stderr)
    return None, done.stderr.strip().splitlines()[-1:]


if __name__ == "__main__":
    main()
