"""Kills a training run with SIGKILL at random moments, resumes it, and compares every bit with an undisturbed run.

    python benchmarks/checks/kill_training.py [--kills 100]

The run is the one with the most state: adapters trained by GRPO with four optimizer steps a rollout, cut draws, a KL
penalty and validation, whose best checkpoint is kept. It saves after every step. When a run has reached its end, the
losses of all its steps, its adapters and its optimizer's state must be those of the undisturbed run, and the next run
begins. Writes benchmarks/results/cpu/kill_training.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

sys.path.insert(0, str(record.ROOT / "examples" / "pretrain"))

import torch
from byte_model import Shape, write_model

from transect.train.config import TrainConfig
from transect.train.loop.checkpoint import newest
from transect.train.loop.report import RunLog, read_log
from transect.train.loop.trainer import Trainer

STEPS = 14
EXACT = ("loss", "gradient_norm", "reward", "ratio", "kl", "clipped")
"""Fields of a step's line in the log that must be equal."""


def write_base(folder: Path) -> Path:
    """Write a small model of bytes with random weights."""
    write_model(folder / "shape", Shape(dim=32, layers=2, heads=2, ffn=64, context=64), chat=True)
    (folder / "text.jsonl").write_text(json.dumps({"text": "a model of bytes " * 40}) + "\n")
    config = {
        "model": str(folder / "shape"), "task": "pretrain", "steps": 1, "run_dir": str(folder / "base"),
        "device": "cpu", "data": {"train": [str(folder / "text.jsonl")], "seq_len": 64, "micro_batch": 128},
    }  # fmt: skip
    return Trainer(TrainConfig.from_dict(config)).run()


def run_config(folder: Path, base: Path, run_dir: Path) -> TrainConfig:
    """Configure the run that is killed."""
    rows = "".join(json.dumps({"prompt": f"{i} or {i + 1}?", "answer": str(i)}) + "\n" for i in range(12))
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "judge.py").write_text("def judge(answer, record):\n    return len(set(answer)) % 4\n")
    return TrainConfig.from_dict(
        {
            "model": str(base), "task": "lora", "objective": "grpo", "run_dir": str(run_dir), "steps": STEPS,
            "device": "cpu", "save_every": 1, "eval_every": 3, "keep": 2, "lora": {"rank": 4},
            "optimizer": {"learning_rate": 2e-3},
            "data": {
                "train": [str(folder / "prompts.jsonl")], "validation": [str(folder / "prompts.jsonl")], "seq_len": 64,
                "micro_batch": 256,
            },
            "grpo": {
                "reward": f"{folder}/judge.py:judge", "prompts": 3, "group": 4, "max_tokens": 8, "iterations": 2,
                "minibatches": 2, "beta": 0.1, "top_k": 40, "temperature": 0.9,
            },
        }
    )  # fmt: skip


def train(config: TrainConfig) -> None:
    """Begin or continue the run, to its end."""
    run_dir = Path(config.run_dir)
    found = newest(run_dir) if any(run_dir.glob("step-*")) else None
    trainer = Trainer(config, found)
    log = RunLog(run_dir, trainer.steps_done, tensorboard=False)
    trainer.run([log])
    log.close()


def bits(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Any]:
    """Read the data that must be equal: lines of the log, tensors of the last checkpoint, and the step of the best
    one."""
    lines = [{k: line[k] for k in EXACT if k in line} for line in read_log(run_dir)]
    last = newest(run_dir)
    return lines, dict(last.tensors), last.state["best"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    kills = in_write = within_rollout = finished = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = write_base(folder)
        begin = time.perf_counter()
        train(run_config(folder, base, folder / "undisturbed"))
        whole = time.perf_counter() - begin
        lines, tensors, best = bits(folder / "undisturbed")
        config = run_config(folder, base, folder / "killed")
        while kills < arguments.kills or finished == 0:
            child = os.fork()
            if child == 0:
                train(config)
                os._exit(0)
            time.sleep(rng.uniform(0.0, 0.5 * whole))
            alive = os.waitpid(child, os.WNOHANG)[0] == 0
            if alive and kills < arguments.kills:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
                run_dir = Path(config.run_dir)
                in_write += bool(list(run_dir.glob(".partial-[0-9]*")))
                if any(run_dir.glob("step-*")):
                    within_rollout += any(key.startswith("objective/") for key in newest(run_dir).tensors)
                continue
            status = os.waitpid(child, 0)[1] if alive else 0
            assert status == 0, "a resumed run failed"
            again, others, other_best = bits(Path(config.run_dir))
            assert again == lines, "a step differs"
            assert set(others) == set(tensors) and all(torch.equal(tensors[key], others[key]) for key in tensors)
            assert other_best == best
            finished += 1
            shutil.rmtree(config.run_dir)
    result = {
        "command": f"python benchmarks/checks/kill_training.py --kills {arguments.kills}",
        "kills": kills,
        "kills_within_a_write": in_write,
        "kills_between_steps_of_a_rollout": within_rollout,
        "runs_that_reached_their_end_with_the_same_bits": finished,
        "steps_of_a_run": STEPS,
        "environment": record.environment(),
    }
    record.write(record.RESULTS / "cpu" / "kill_training.json", result)
    print(result)


if __name__ == "__main__":
    main()
