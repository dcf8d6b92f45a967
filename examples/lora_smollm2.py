r"""Teach SmolLM2 to answer in JSON, with LoRA: a model of 135 million weights, none of which changes.

    y = W x + (alpha / rank) B A x        W [out, in] frozen, A [rank, in], B [out, rank]

Fine-tuning all of W would need its gradient and two moments, 12 more bytes for each weight. Hu et al. (2021,
arXiv:2106.09685) found that what fine-tuning adds to W has low rank, so it may as well be written as a product of two
thin matrices and only these trained. B begins as zeros: at the start the model is the old one exactly. With rank 8
there is one new number for some 50 old ones. Since W wants no gradient, the backward pass has one matrix product less
for each W, dW = dY^T X. It still goes through every W on its way down, dX = dY W; ``transect explain backward
smollm2-135m --task lora`` shows that.

The data are chats made below: a question for a capital, an answer as one line of JSON. The loss is taken on the
assistant's tokens only; the questions are given, not learned. The countries that are asked for in the end were never
trained on. The form is learned from 24 examples in a few steps; for the capitals there is only what the model knew
before, which at this size is not everything.

The run is the project's ``Trainer``, the same as behind ``transect train``. Needs the built-in model (``transect pull
smollm2-135m``).

    python examples/lora_smollm2.py
"""

import argparse
import json
import tempfile
from pathlib import Path

from curve import show
from torch import Tensor

from transect.engine.scheduling.sampling_params import SamplingParams
from transect.train.config import TrainConfig
from transect.train.loop.trainer import Trainer
from transect.train.model.build import Trainable
from transect.train.objectives.rollout import roll_out

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Canada": "Ottawa", "Kenya": "Nairobi",
    "Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana", "India": "New Delhi", "China": "Beijing", "Iraq": "Baghdad",
    "Poland": "Warsaw", "Austria": "Vienna", "Portugal": "Lisbon", "Ireland": "Dublin", "Russia": "Moscow",
    "Thailand": "Bangkok", "Argentina": "Buenos Aires", "Hungary": "Budapest", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Turkey": "Ankara", "Vietnam": "Hanoi",
}  # fmt: skip
NEW = {"Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid"}
"""Asked in the end, never trained on."""


def question(country: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the capital of {country}?"}


def write_chats(path: Path) -> Path:
    """One chat a line, as ``transect train`` reads them."""
    with path.open("w") as file:
        for country, capital in CAPITALS.items():
            answer = {"role": "assistant", "content": json.dumps({"country": country, "capital": capital})}
            file.write(json.dumps({"messages": [question(country), answer]}) + "\n")
    return path


def run_config(folder: Path, steps: int) -> TrainConfig:
    """A run over the chats, written to ``folder``."""
    return TrainConfig.from_dict(
        {
            "model": "smollm2-135m",
            "task": "lora",
            "run_dir": str(folder / "run"),
            "steps": steps,
            "device": "cpu",
            "data": {"train": [str(write_chats(folder / "chats.jsonl"))], "seq_len": 128, "micro_batch": 192},
            "lora": {"rank": 8, "alpha": 16.0},
            "optimizer": {"learning_rate": 2e-3, "weight_decay": 0.0},
            "schedule": {"kind": "cosine", "warmup": min(2, steps - 1)},
        }
    )


def answers(trainable: Trainable) -> dict[str, str]:
    """What the model says about the countries in ``NEW``, greedily, by the engine, over the weights as they are."""
    tokenizer, template = trainable.tokenizer, trainable.template
    assert tokenizer is not None and template is not None
    prompts = [
        tokenizer.encode(template.render([question(country)], add_generation_prompt=True), parse_special=True)
        for country in NEW
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    drawn = roll_out(trainable.model, prompts, params, eos_token_ids=tokenizer.eos_token_ids, seed=0)
    return {country: tokenizer.decode(list(a.token_ids)).strip() for country, a in zip(NEW, drawn, strict=True)}


def is_right(country: str, answer: str) -> bool:
    """Whether it is the JSON that was asked for, with the right capital."""
    try:
        return json.loads(answer) == {"country": country, "capital": NEW[country]}
    except ValueError:
        return False


def loss() -> Tensor:
    """The loss of the first step, for ``transect explain backward examples/lora_smollm2.py``."""
    with tempfile.TemporaryDirectory() as folder:
        objective = Trainer(run_config(Path(folder), steps=1)).objective
        return objective.loss(objective.batches(0)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA fine-tuning of SmolLM2 on chats made here.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run_config(Path(folder), options.steps))
        trained = sum(p.numel() for p in trainer.trainable.parameters.values())
        whole = sum(p.numel() for p in trainer.model.parameters())
        print(f"{len(CAPITALS)} chats; {trained:,} numbers are trained beside {whole - trained:,} frozen ones")
        before = answers(trainer.trainable)
        losses = []
        for _ in range(options.steps):
            record = trainer.step()
            losses.append(record.loss)
            print(
                f"step {record.step:3}: loss {record.loss:.3f} nats, {record.labels} labels of {record.tokens} tokens, "
                f"{record.tokens_per_second:.0f} tokens/s"
            )
        after = answers(trainer.trainable)
    for country in NEW:
        print(f"\n{question(country)['content']}")
        print(f"  before: {before[country]!r}\n  after:  {after[country]!r}")
    print(f"\n{sum(is_right(*item) for item in after.items())} of {len(NEW)} are JSON with the right capital")
    show({"loss": losses}, options.plot)


if __name__ == "__main__":
    main()
