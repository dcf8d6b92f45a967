"""QLoRA: the chats of ``lora_smollm2.py``, over a base in 4 bits.

The matrices of the layers are rounded to 4 bits, in groups that share a scale and a zero, and stay so. For a product a
matrix is made dense, used and forgotten, forward and backward:

    y = dequantize(Q) x + (alpha / rank) B A x        gradients reach A, B and x, never Q

So a base takes a quarter of its 16-bit memory, and the adapters learn what rounding cost along with the task. Needs the
built-in model (``transect pull smollm2-135m``).

    python examples/qlora.py
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

from curve import show
from lora_smollm2 import NEW, answers, is_right, question, run_config

from transect.train.loop.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="QLoRA fine-tuning of SmolLM2 on chats made here.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), options.steps)
        lora = dataclasses.replace(config.lora, group=32)  # two groups must fit into a row of 576 numbers
        trainer = Trainer(dataclasses.replace(config, task="qlora", lora=lora))
        layers = [(weight, name) for name, weight in trainer.model.weights() if name != "head"]
        numbers = sum(weight.out_features * weight.in_features for weight, _ in layers)
        trained = sum(p.nbytes for p in trainer.trainable.parameters.values())
        held = sum(weight.nbytes for weight, _ in layers) - trained
        print(
            f"{len(layers)} matrices of {numbers:,} numbers take {held / 2**20:.0f} MiB, {8 * held / numbers:.1f} bits "
            f"each; in float32 they took {numbers * 4 / 2**20:.0f} MiB"
        )
        before = answers(trainer.trainable)
        losses = []
        for _ in range(options.steps):
            record = trainer.step()
            losses.append(record.loss)
            print(f"step {record.step:3}: loss {record.loss:.3f} nats, {record.tokens_per_second:.0f} tokens/s")
        after = answers(trainer.trainable)
    for country in NEW:
        print(f"\n{question(country)['content']}")
        print(f"  before: {before[country]!r}\n  after:  {after[country]!r}")
    print(f"\n{sum(is_right(*item) for item in after.items())} of {len(NEW)} are JSON with the right capital")
    show({"loss": losses}, options.plot)


if __name__ == "__main__":
    main()
