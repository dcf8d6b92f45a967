"""Reinforcement learning with a verifier: a small model that often adds wrongly learns to add, from a yes or no alone.

Nobody shows the model a right answer in the second part. It answers each question several times, a function says which
answers are right, and what was better than its group becomes likelier (GRPO). The loss of one token t of answer i:

    ratio = p(t) / p_old(t)       A_i = (r_i - mean(r)) / (std(r) + 1e-4)
    loss  = -min(ratio A_i, clip(ratio, 1 - 0.2, 1 + 0.28) A_i) + beta KL(p, p0)

p_old drew the answers; p0 is the model before the second part. First the model must be right now and then, so the first
part trains it on sums of which half are wrong.

    python examples/grpo.py
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from curve import show

from transect.train.config import TrainConfig
from transect.train.loop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent / "pretrain"))

from byte_model import Shape, write_model

HIGHEST = 5
"""Sums of two numbers below this."""


def write_sums(folder: Path) -> tuple[Path, Path]:
    """Chats with sums of which every second one is wrong; and the questions with their right answers."""
    chats, questions = folder / "chats.jsonl", folder / "questions.jsonl"
    with chats.open("w") as wrong_too, questions.open("w") as right:
        for a in range(HIGHEST):
            for b in range(HIGHEST):
                row = {"prompt": f"{a}+{b}", "answer": str(a + b)}
                right.write(json.dumps(row) + "\n")
                for repeat in range(6):
                    said = a + b if repeat % 2 else (a + 3 * b + repeat) % 10
                    answer = {"role": "assistant", "content": str(said)}
                    messages = [{"role": "user", "content": row["prompt"]}, answer]
                    wrong_too.write(json.dumps({"messages": messages}) + "\n")
    return chats, questions


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on sums, from a model that is right now and then.")
    parser.add_argument("--steps", type=int, default=40, help="of the second part")
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chats, questions = write_sums(folder)
        write_model(folder / "shape", Shape(dim=64, layers=2, heads=4, ffn=192, context=64), chat=True)
        common = {"device": "cpu", "data": {"seq_len": 64, "micro_batch": 1024}}
        taught = Trainer(
            TrainConfig.from_dict(
                {
                    **common,
                    "model": str(folder / "shape"),
                    "task": "pretrain",
                    "run_dir": str(folder / "taught"),
                    "steps": 200,
                    "data": {**common["data"], "train": [str(chats)]},
                    "optimizer": {"name": "muon", "learning_rate": 4e-3},
                }
            )
        )
        base = taught.run()
        trainer = Trainer(
            TrainConfig.from_dict(
                {
                    **common,
                    "model": str(base),
                    "objective": "grpo",
                    "run_dir": str(folder / "rewarded"),
                    "steps": options.steps,
                    "data": {**common["data"], "train": [str(questions)]},
                    "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0},
                    "schedule": {"kind": "constant"},
                    "grpo": {
                        "reward": "exact",
                        "prompts": 12,
                        "group": 8,
                        "minibatches": 2,
                        "max_tokens": 4,
                        "clip_high": 0.28,
                        "beta": 0.01,
                    },
                }
            )
        )
        rewards = []
        for _ in range(options.steps):
            record = trainer.step()
            rewards.append(record.extra["reward"])
            if record.step % 4 == 0:
                numbers = record.extra
                print(
                    f"step {record.step:3}: reward {numbers['reward']:.2f}, ratio up to {numbers['ratio']:.2f}, "
                    f"KL {numbers['kl']:.3f}"
                )
    last = rewards[-6:]
    print(f"\nright answers: {rewards[0]:.0%} of the first rollout, {sum(last) / len(last):.0%} of the last ones")
    show({"reward": rewards}, options.plot)


if __name__ == "__main__":
    main()
