"""Optimizers for slow links and for large batches, on two CPU ranks that talk by gloo: final losses and bytes sent.

    nice -n 5 python benchmarks/train/onebit.py OUT.json [--steps 1000] [--only NAME,...]

A byte-level decoder of 0.2 million numbers learns the manual of Python (``pydoc_data.topics``, part of every Python)
from the same first weights and with the same batches: 2 x 1024 tokens a step. 1-bit Adam and 0/1 Adam stand beside
AdamW, with AdamW's settings, and 1-bit LAMB beside LAMB. Then LAMB stands beside AdamW at 8 times the batch and an
eighth of the steps, at the best of three learning rates each. The final loss is the validation loss, on a twentieth of
the text that is not trained on. Bytes are those that a rank sends in a step after the warm-up: counted where signs are
sent; for AdamW those of a ring in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "pretrain"))

RANKS, SEQUENCE, TOKENS = 2, 128, 1024
LARGER = 8
RATE, WARM_UP = 3e-3, 0.25
"""Learning rate of those at the usual batch, and the share of the steps that are not compressed."""
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "onebit_adam": {"name": "onebit_adam"},
    "onebit_adam, bfloat16, ZeRO 1": {"name": "onebit_adam", "precision": "bfloat16", "zero": 1},
    "zero_one_adam, every 2": {"name": "zero_one_adam", "sync_every": 2},
    "lamb, 0.02": {"name": "lamb", "learning_rate": 2e-2},
    "onebit_lamb, 0.02": {"name": "onebit_lamb", "learning_rate": 2e-2},
    **{f"adamw, 8 x, {rate:g}": {"learning_rate": rate, "larger": LARGER} for rate in (2e-3, 4e-3, 8e-3)},
    **{
        f"lamb, 8 x, {rate:g}": {"name": "lamb", "learning_rate": rate, "larger": LARGER} for rate in (1e-2, 2e-2, 4e-2)
    },
}


def prepare(folder: Path) -> None:
    """Write the model's directory and two text files."""
    from byte_model import Shape, write_model

    write_model(folder / "model", Shape(64, 3, heads=2, ffn=192, context=SEQUENCE))
    topics = pydoc_data.topics.topics
    parts: dict[str, list[str]] = {"train": [], "held-out": []}
    for number, name in enumerate(sorted(topics)):
        parts["held-out" if number % 20 == 10 else "train"].append(topics[name])
    for name, texts in parts.items():
        (folder / f"{name}.txt").write_text("\n\n".join(texts), encoding="utf-8")


def configuration(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Return the run called ``name``."""
    changes = dict(RUNS[name])
    larger, zero, precision = changes.pop("larger", 1), changes.pop("zero", 0), changes.pop("precision", "float32")
    steps //= larger
    return {
        "model": str(folder / "model"),
        "task": "pretrain",
        "run_dir": str(folder / name.replace(",", "").replace(" ", "-")),
        "steps": steps,
        "accumulate": RANKS * larger,
        "precision": precision,
        "save_every": 0,
        "device": "cpu",
        "threads": 1,
        "log_to": [],
        "data": {
            "train": [str(folder / "train.txt")],
            "validation": [str(folder / "held-out.txt")],
            "seq_len": SEQUENCE,
            "micro_batch": TOKENS,
        },
        "optimizer": {"learning_rate": RATE, "freeze_step": max(1, int(WARM_UP * steps)), **changes},
        "schedule": {"kind": "cosine", "warmup": max(1, steps // 20)},
        "parallel": {"data": RANKS, "zero": zero},
    }


def measure(ranks: Any, folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Measure one run."""
    from transect.parallel.compressed import full_sum_bytes
    from transect.train.loop.follow import JOB, RunArguments
    from transect.train.optim.onebit import OneBitAdam

    run = RunArguments(configuration(folder, name, steps))
    ranks.call(JOB, run)
    trainer = run.trainer(ranks.world)
    losses: list[float] = []
    found: dict[str, float] = {}

    class Listener:
        def step(self, record: Any) -> None:
            losses.append(record.loss)

        def evaluation(self, record: Any) -> None:
            found["validation"] = record.loss

        def sample(self, record: Any) -> None:
            """Do nothing."""

    trainer.run([Listener()])
    optimizer = trainer.optimizer
    numbers = sum(parameter.numel() for parameter in trainer.trainable.parameters.values())
    full = full_sum_bytes(numbers, RANKS)
    sent = float(full)
    if isinstance(optimizer, OneBitAdam) and optimizer.sums is not None:
        sent = optimizer.sums.sent / (trainer.steps_done - trainer.config.optimizer.freeze_step)
    return {
        "name": name,
        "steps": trainer.steps_done,
        "numbers": numbers,
        "validation_loss": found["validation"],
        "train_loss": sum(losses[-10:]) / len(losses[-10:]),
        "bytes_a_step": sent,
        "fewer": full / sent,
        "losses": [round(loss, 4) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", default=";".join(RUNS), help="names, with semicolons between")
    parser.add_argument("--more", action="store_true", help="beside what OUT has already")
    arguments = parser.parse_args()
    from transect.hardware.environment import environment
    from transect.parallel.launch import Ranks

    folder = Path(tempfile.mkdtemp())
    prepare(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text())["rows"] if arguments.more else []
    ranks = Ranks.start(RANKS)
    try:
        for name in arguments.only.split(";"):
            rows.append(measure(ranks, folder, name, arguments.steps))
            base = next((row for row in rows if row["name"] == "adamw"), None)
            if base is not None:
                rows[-1]["beside_adamw"] = rows[-1]["validation_loss"] / base["validation_loss"] - 1
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "losses"}), flush=True)
            result = {
                "command": "python benchmarks/train/onebit.py OUT.json",
                "method": "two gloo ranks of one machine, the same first weights and batches; validation loss in nats "
                "a byte; bytes that a rank sends for gradients in a step after the warm-up",
                "rows": rows,
                "environment": environment(("torch",)),
            }
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
