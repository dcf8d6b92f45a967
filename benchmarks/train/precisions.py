"""Pretraining in bfloat16 beside float32: validation loss at the end, and what weights, gradients and state take.

    python benchmarks/train/precisions.py benchmarks/results/cpu/precisions.json [--steps N] [--seeds N]

A small decoder (the shape and batch of ``examples/pretrain/shakespeare-cpu.toml``) learns Python's manual byte by byte
from random weights; its last tenth is held out. Every contender sees the same batches in the same order.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks.record import commit, environment, made_at, release, write

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "pretrain"))

CONTENDERS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "float32 master weights": {"precision": "mixed"},
    "bfloat16, rounded by chance": {"precision": "bfloat16"},
    "bfloat16, rounded to the nearest": {"precision": "bfloat16", "optimizer": {"rounding": "nearest"}},
}


def prepare(folder: Path) -> None:
    """Model shape and text."""
    from pydoc_data.topics import topics

    from byte_model import Shape, write_model

    write_model(folder / "shape", Shape(dim=128, layers=4, heads=4, ffn=336, context=64))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    cut = int(0.9 * len(text))
    (folder / "train.txt").write_text(text[:cut])
    (folder / "validation.txt").write_text(text[cut:])


def measure(folder: Path, contender: dict[str, Any], steps: int, seed: int) -> dict[str, float]:
    """Train once."""
    from transect.train.config import TrainConfig
    from transect.train.loop.trainer import Trainer

    optimizer = {"learning_rate": 1e-3, "beta2": 0.99, "weight_decay": 0.1, **contender.get("optimizer", {})}
    config = TrainConfig.from_dict(
        {
            "model": str(folder / "shape"),
            "task": "pretrain",
            "run_dir": str(folder / "run"),
            "device": "cpu",
            "threads": 1,
            "steps": steps,
            "seed": seed,
            "precision": contender["precision"],
            "data": {
                "train": [str(folder / "train.txt")],
                "validation": [str(folder / "validation.txt")],
                "seq_len": 64,
                "micro_batch": 768,
            },
            "optimizer": optimizer,
            "schedule": {"kind": "cosine", "warmup": steps // 20, "final": 0.1},
        }
    )
    trainer = Trainer(config)
    begun = time.perf_counter()
    for _ in range(steps):
        record = trainer.step()
    parameters = list(trainer.trainable.parameters.values())
    weights = sum(p.nbytes for p in parameters)
    found = trainer.evaluate()
    assert found is not None
    return {
        "validation_loss": found.loss,
        "train_loss": record.loss,
        "bytes_per_weight": (2 * weights + trainer.optimizer.state_bytes()) / sum(p.numel() for p in parameters),
        "seconds": time.perf_counter() - begun,
    }


def table(result: dict[str, Any]) -> str:
    """Format the table of the page on training."""
    runs = result["runs"]
    seeds = sorted({run["seed"] for run in runs})
    found = {(run["contender"], run["seed"]): run for run in runs}
    heads = [f"validation loss, seed {seed}" for seed in seeds]
    lines = [
        f"| weights and state | bytes per weight | {' | '.join(heads)} | over float32 |",
        "|---" * (3 + len(seeds)) + "|",
    ]
    for name in CONTENDERS:
        losses = [found[name, seed]["validation_loss"] for seed in seeds]
        over = [loss / found["float32", seed]["validation_loss"] - 1 for loss, seed in zip(losses, seeds, strict=True)]
        cells = [f"{loss:.4f}" for loss in losses]
        mean = sum(over) / len(over)
        lines.append(
            f"| {name} | {found[name, seeds[0]]['bytes_per_weight']:.0f} | {' | '.join(cells)} | {mean:+.2%} |"
        )
    lines.append(
        f"\n`{result['command']}`: {result['steps']} steps of 768 tokens, {made_at([result['environment']])}.\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        for seed in range(arguments.seeds):
            for name, contender in CONTENDERS.items():
                runs.append({"contender": name, "seed": seed, **measure(Path(place), contender, arguments.steps, seed)})
                print(runs[-1], flush=True)
    result = {
        "command": f"python benchmarks/train/precisions.py --steps {arguments.steps} --seeds {arguments.seeds}",
        "steps": arguments.steps,
        "commit": commit(),
        "version": release(),
        "environment": environment(),
        "runs": runs,
    }
    write(arguments.out, result)


if __name__ == "__main__":
    main()
