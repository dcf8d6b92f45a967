"""Direct preference optimization of SmolLM2: the shorter of two right answers is preferred.

For a question with a chosen answer c and a rejected one r, p the model and p0 the model before its first step:

    d    = (log p(c) - log p0(c)) - (log p(r) - log p0(r))
    loss = -log sigmoid(beta d)

At the start d is 0 and the loss log 2. ``margin`` in the output is d: how much likelier the short answers have become,
beside the long ones, than they were. p0 is not kept: its log-probabilities are taken once. Needs the built-in model
(``transect pull smollm2-135m``).

Only the difference counts in this loss, so with many more steps both answers become less likely and the model says
neither: try ``--steps 20``. A larger beta, a smaller learning rate, or ORPO, which learns the chosen answers too, hold
against that.

    python examples/dpo.py
"""

import argparse
import json
import tempfile
from pathlib import Path

from curve import show
from lora_smollm2 import CAPITALS, NEW, answers, question

from transect.train.config import TrainConfig
from transect.train.loop.trainer import Trainer


def write_pairs(path: Path) -> Path:
    """One pair a line: a word, or a sentence."""
    with path.open("w") as file:
        for country, capital in CAPITALS.items():
            row = {
                "prompt": question(country)["content"],
                "chosen": capital,
                "rejected": f"The capital of {country} is {capital}.",
            }
            file.write(json.dumps(row) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="DPO of SmolLM2 on pairs made here.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = TrainConfig.from_dict(
            {
                "model": "smollm2-135m",
                "task": "lora",
                "objective": "dpo",
                "run_dir": str(folder / "run"),
                "steps": options.steps,
                "device": "cpu",
                "data": {"train": [str(write_pairs(folder / "pairs.jsonl"))], "seq_len": 128, "micro_batch": 256},
                "dpo": {"beta": 0.3},
                "lora": {"rank": 8, "alpha": 16.0},
                "optimizer": {"learning_rate": 2e-4, "weight_decay": 0.0},
                "schedule": {"kind": "constant"},
            }
        )
        trainer = Trainer(config)
        print(f"{len(CAPITALS)} pairs; their log-probabilities under the model as it is are taken")
        before = answers(trainer.trainable)
        losses = []
        for _ in range(options.steps):
            record = trainer.step()
            losses.append(record.loss)
            print(
                f"step {record.step:3}: loss {record.loss:.3f}, margin {record.extra['margin']:.2f} nats, the short "
                f"answer gained more in {record.extra['accuracy']:.0%}"
            )
        after = answers(trainer.trainable)
    for country in NEW:
        print(f"\n{question(country)['content']}")
        print(f"  before: {before[country]!r}\n  after:  {after[country]!r}")
    show({"loss": losses}, options.plot)


if __name__ == "__main__":
    main()
