"""Answers of a LoRA in training: drawn with the weights in training, or by an engine that takes them as an adapter.

    python benchmarks/train/rollout.py [--prompts 4] [--group 4] [--tokens 48] [--rounds 5]

Both draw the same answers (the same seeds, temperature 1) of SmolLM2-135M with a LoRA of rank 16 on all matrices.
Before each round the weights move, as after an optimizer step; ``update`` is the time until the engine has the new
ones: copy, digest, packing. Contenders take turns within each round; ratios are of one round.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.train.config import TrainConfig
from transect.train.model.build import build
from transect.train.objectives.adapter_engine import AdapterEngine
from transect.train.objectives.rollout import roll_out

TEXTS = ("The capital of France is", "To make bread you need", "A train leaves the station", "In the year 1900")


def rollout_table(result: dict[str, Any]) -> str:
    """Format the seconds of a rollout."""
    lines = ["| | seconds (median) | fastest to slowest |", "|---|---|---|"]
    names = {"shared": "weights in training", "adapter": "engine over the base", "update": "of it, the update"}
    for name, words in names.items():
        found = result["seconds"][name]
        lines.append(f"| {words} | {found['median']:.2f} | {found['min']:.2f} to {found['max']:.2f} |")
    machine = result["environment"]
    where = f"{machine['cores']} cores of an {machine['processor']}, torch {machine['packages']['torch']}"
    work = f"{result['answers']} answers of {result['tokens']} tokens, {found['runs']} rounds"
    return "\n".join(lines) + f"\n\n`{result['command']}`: {work}, on {where}, {record.made_at([machine])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "rollout.json")
    options = parser.parse_args()
    config = TrainConfig.from_dict(
        {
            "model": "smollm2-135m",
            "task": "lora",
            "objective": "grpo",
            "device": "cpu",
            "data": {"train": ["none.jsonl"], "seq_len": 128},
            "grpo": {"prompts": options.prompts, "group": options.group, "max_tokens": options.tokens},
        }
    )
    trainable = build(config)
    assert trainable.tokenizer is not None
    prompts = [trainable.tokenizer.encode(text) for text in TEXTS[: options.prompts]]
    params = SamplingParams(n=options.group, max_tokens=options.tokens, temperature=1.0, ignore_eos=True)
    engine = AdapterEngine(config, trainable)
    moved = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {"shared": [], "adapter": [], "update": []}
    equal = 0
    for turn in range(options.rounds + 1):
        with torch.no_grad():
            for parameter in trainable.parameters.values():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=moved)
        found, took = {}, {}
        for name in ("shared", "adapter") if turn % 2 else ("adapter", "shared"):
            began = time.perf_counter()
            if name == "shared":
                found[name] = roll_out(trainable.model, prompts, params, eos_token_ids=(), seed=turn)
            else:
                engine.update()
                took["update"] = time.perf_counter() - began
                found[name] = engine.draw(prompts, params, eos_token_ids=(), seed=turn)
            took[name] = time.perf_counter() - began
        equal += found["shared"] == found["adapter"] or [each.token_ids for each in found["shared"]] == [
            each.token_ids for each in found["adapter"]
        ]
        if turn:  # the first round warms up
            for name, value in took.items():
                seconds[name].append(value)
        print(turn, {name: round(value, 3) for name, value in took.items()}, flush=True)
    ratios = [shared / own for shared, own in zip(seconds["shared"], seconds["adapter"], strict=True)]
    result: dict[str, Any] = {
        "model": config.model,
        "rank": config.lora.rank,
        "answers": options.prompts * options.group,
        "tokens": options.tokens,
        "seconds": {name: record.summary(values) for name, values in seconds.items()},
        "shared_over_adapter": record.summary(ratios),
        "rounds_with_equal_tokens": equal,
        "environment": record.environment(),
        "command": record.command("benchmarks/train/rollout.py"),
    }
    record.write(options.out, result)


if __name__ == "__main__":
    main()
