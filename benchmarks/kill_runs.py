"""Kills training runs with SIGKILL at random moments, takes them up again, and compares the end with a run left alone.

    python benchmarks/kill_runs.py [--kills 200] [--seconds 1200]

Each kind of run below is trained once without a kill. Then it is trained again, killed whenever chance says, and taken
up from its newest checkpoint, until it is done. Losses of all steps, every tensor of the last checkpoint and the step
of the best one must be the same, to the bit. Writes benchmarks/results/cpu/kill_runs.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import record

sys.path.insert(0, str(record.ROOT / "src"))
sys.path.insert(0, str(record.ROOT / "examples" / "pretrain"))

from transect.train.checkpoint import list_steps, newest
from transect.train.config import TrainConfig
from transect.train.report import RunLog, read_log
from transect.train.trainer import Trainer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STEPS = 24
KINDS: dict[str, dict[str, Any]] = {
    "best checkpoint, all weights in bfloat16 rounded by chance": {
        "task": "pretrain", "precision": "bfloat16", "eval_every": 1, "patience": STEPS, "accumulate": 2,
        "optimizer": {"learning_rate": 3e-2},
    },
    "adapters in bfloat16, best checkpoint": {
        "task": "lora", "precision": "bfloat16", "eval_every": 3, "patience": STEPS,
        "optimizer": {"learning_rate": 1e-2},
    },
    "adapters with dropout": {
        "task": "lora", "lora": {"rank": 4, "dropout": 0.3}, "optimizer": {"learning_rate": 1e-2},
    },
    "four optimizer steps a rollout, adapters": {
        "task": "lora", "objective": "grpo", "optimizer": {"learning_rate": 1e-2},
        "grpo": {"reward": "kill_runs:digits", "prompts": 2, "group": 4, "max_tokens": 6, "minibatches": 2,
                 "iterations": 2},
    },
}  # fmt: skip


def digits(answer: str, record: Any) -> float:
    """A reward that random models earn now and then: the share of vowels and spaces."""
    return sum(letter in "aeiou " for letter in answer) / max(len(answer), 1)


def config_of(folder: Path, kind: dict[str, Any], run_dir: Path) -> TrainConfig:
    """The configuration of a run; its data are written beside it once."""
    if not (folder / "shape").exists():
        from byte_model import Shape, write_model

        write_model(folder / "shape", Shape(dim=64, layers=2, heads=2, ffn=96, context=128))
        (folder / "text.txt").write_text("".join(f"{i} and {j} are {i + j}.\n" for i in range(40) for j in range(9)))
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(9)))
    data: dict[str, Any] = {"seq_len": 64, "micro_batch": 256, "chat_template": TEMPLATE}
    if kind.get("objective") == "grpo":
        data["train"] = [str(folder / "prompts.jsonl")]
    else:
        data |= {"train": [str(folder / "text.txt")], "validation": [str(folder / "text.txt")]}
    return TrainConfig.from_dict(
        {
            "model": str(folder / "shape"), "load_format": "dummy", "run_dir": str(run_dir), "steps": STEPS,
            "save_every": 2, "device": "cpu", "threads": 1, "log_to": [], "data": data, **kind,
        }
    )  # fmt: skip


def train(config: TrainConfig, begun: int | None = None) -> None:
    """Train to the end from wherever the run is; write a byte to ``begun`` when the first step is about to begin."""
    found = newest(config.run_dir) if list_steps(config.run_dir) else None
    trainer = Trainer(config if found is None else TrainConfig.from_dict(found.state["config"]), found)
    log = RunLog(config.run_dir, trainer.steps_done, tensorboard=False)
    if begun is not None:
        os.write(begun, b".")
    trainer.run([log])
    log.close()


def digest(run_dir: Path) -> dict[str, Any]:
    """What must be the same."""
    found = newest(run_dir)
    made = hashlib.sha256()
    for path in sorted(found.path.rglob("*.safetensors")):
        made.update(path.read_bytes())
    losses = [line["loss"] for line in read_log(run_dir) if line["kind"] == "step"]
    best = run_dir / "best"
    return {"losses": losses, "tensors": made.hexdigest(), "best": best.resolve().name if best.exists() else ""}


def killed(config: TrainConfig, rng: random.Random) -> tuple[bool, bool]:
    """Train in a child and kill it. Returns whether it was done first, and whether a checkpoint was being written."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            train(config, writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    until = time.monotonic() + rng.uniform(0.0, 1.5)
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if status:
                raise RuntimeError(f"the run {config.run_dir} failed by itself: {status}")
            return True, False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False, bool(list(Path(config.run_dir).glob(".partial-[0-9]*")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    begun = time.monotonic()
    rows = {name: {"kills": 0, "within_a_write": 0, "runs": 0, "same": 0} for name in KINDS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        expected = {}
        for number, (name, kind) in enumerate(KINDS.items()):
            config = config_of(folder, kind, folder / f"whole-{number}")
            child = os.fork()  # no thread of this process may be there when others are forked
            if child == 0:
                train(config)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, name
            expected[name] = digest(Path(config.run_dir))
            print(name, expected[name]["best"], flush=True)
        while True:
            for number, (name, kind) in enumerate(KINDS.items()):
                row = rows[name]
                run_dir = folder / f"killed-{number}-{row['runs']}"
                config = config_of(folder, kind, run_dir)
                done = False
                while not done:
                    done, in_write = killed(config, rng)
                    row["kills"] += not done
                    row["within_a_write"] += in_write
                row["runs"] += 1
                same = digest(run_dir) == expected[name]
                row["same"] += same
                print(name, row, "same" if same else "DIFFERENT", flush=True)
            kills = sum(row["kills"] for row in rows.values())
            if kills >= arguments.kills or time.monotonic() - begun > arguments.seconds:
                break
    result = {
        "command": f"python benchmarks/kill_runs.py --kills {arguments.kills}",
        "kills": kills,
        "kinds": rows,
        "environment": record.environment(),
    }
    record.write(record.RESULTS / "cpu" / "kill_runs.json", result)
    print(result)


if __name__ == "__main__":
    main()
