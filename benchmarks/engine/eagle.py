"""Train an EAGLE-3 head for a small model on a CPU, and measure its acceptance before and after.

    python benchmarks/engine/eagle.py data --folder DIRECTORY
    python benchmarks/engine/eagle.py train --folder DIRECTORY [--minutes 4]
    python benchmarks/engine/eagle.py measure --folder DIRECTORY

``data`` draws answers of the model to beginnings of this project's pages, several to each where ``--answers`` asks for
more, and ``train`` trains a head on them; another call continues. With ``--device cuda --batch-tokens 8192`` a GPU
trains a better one in the same minutes. ``measure`` lets the new head and the trained one draft three tokens in each
step, on beginnings of pages that the data do not have, greedy and at temperature 1, and then lets the engine choose the
number. Each takes minutes on two cores. Contenders take turns within each round; ratios are of one round; answers are
compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.speculation import Contender, race
from transect import LLM, SamplingParams
from transect.train.config import TrainConfig
from transect.train.loop.checkpoint import list_steps, newest
from transect.train.loop.trainer import Trainer

MODEL = "smollm2-135m"
BEGIN = 24
"""Tokens of a page's part that an answer continues."""
HELD_OUT = 7
"""Each page of this number is held out."""


def beginnings(llm: LLM, held_out: bool) -> list[list[int]]:
    """Return the first tokens of the paragraphs of the project's pages."""
    found = []
    tokenizer = llm.get_tokenizer()
    for index, page in enumerate(sorted((record.ROOT / "docs").rglob("*.md"))):
        if (index % HELD_OUT == 0) != held_out:
            continue
        for paragraph in page.read_text().split("\n\n"):
            tokens = tokenizer.encode(paragraph)[:BEGIN]
            if len(tokens) == BEGIN and paragraph[0].isalpha():
                found.append(tokens)
    return found


def data(options: argparse.Namespace) -> None:
    """Write answers of the model."""
    llm = LLM(MODEL, device=options.device, max_model_len=512, max_num_seqs=32)
    pages = beginnings(llm, False)
    prompts = [pages[i % len(pages)] for i in range(options.answers)]
    params = [SamplingParams(max_tokens=options.tokens, temperature=0.7, seed=i) for i in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = llm.get_tokenizer()
    with (options.folder / "answers.jsonl").open("w") as file:
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = [*prompt, *output.outputs[0].token_ids]
            file.write(json.dumps({"text": tokenizer.decode(tokens)}) + "\n")


def config_of(options: argparse.Namespace, steps: int, run: str) -> TrainConfig:
    folder = options.folder
    return TrainConfig.from_dict(
        {
            "model": MODEL,
            "objective": "eagle3",
            "run_dir": str(folder / run),
            "steps": steps,
            "device": options.device,
            "precision": "mixed" if options.device == "cuda" else "float32",
            "data": {"train": [str(folder / "answers.jsonl")], "seq_len": 192, "micro_batch": options.batch_tokens},
            "optimizer": {"learning_rate": 2e-3},
            "eagle3": {"vocabulary": 4096, "steps": 3},
        }
    )


def train(options: argparse.Namespace) -> None:
    """Train a head, and write a new one beside it."""
    new = Trainer(config_of(options, 1, "new"))
    for line in new.objective.described():
        print(line, flush=True)
    new.trainable.snapshot()(options.folder / "new")
    config = config_of(options, options.steps, "run")
    checkpoint = newest(config.run_dir) if list_steps(config.run_dir) else None
    trainer = Trainer(config, checkpoint)
    kept = options.folder / "losses.json"
    losses: list[dict[str, float]] = json.loads(kept.read_text()) if checkpoint is not None else []
    began = time.perf_counter()

    class Listening:
        def step(self, found: Any) -> None:
            losses.append({"loss": found.loss, "seconds": found.seconds, **found.extra})
            if found.step % 10 == 1:
                print(found.step, round(found.loss, 3), {k: round(v, 3) for k, v in found.extra.items()}, flush=True)

    trainer.run([Listening()], lambda: time.perf_counter() - began > 60 * options.minutes)
    kept.write_text(json.dumps(losses))
    first, last = (
        {name: sum(each[name] for each in part) / len(part) for name in part[0]} for part in (losses[:5], losses[-20:])
    )
    seconds = sum(each["seconds"] for each in losses)
    found = {
        "steps": len(losses),
        "seconds": seconds,
        "tokens_a_step": options.batch_tokens,
        "first_5": first,
        "last_20": last,
    }
    record.write(options.folder / "training.json", found)


def measure(options: argparse.Namespace) -> None:
    """Measure acceptance and speed of the new and of the trained head."""
    found: dict[str, Any] = {"model": MODEL, "training": json.loads((options.folder / "training.json").read_text())}
    found |= {
        "environment": record.environment(),
        "command": record.command("benchmarks/engine/eagle.py").replace(str(options.folder), "DIRECTORY"),
    }
    found["heads"] = {}
    for name in ("new", "run/last"):
        path = str(options.folder / name)
        spec = {"method": "eagle3", "model": path}
        limits = {"device": options.device, "enable_prefix_caching": False, "max_model_len": 512, "seed": 1}
        limits["max_num_seqs"] = 1 if options.alone else 16
        llm = LLM(MODEL, speculative_config=spec, **limits)
        speculation = llm._core.scheduler.speculation
        prompts = beginnings(llm, True)[:: max(1, len(beginnings(llm, True)) // options.prompts)][: options.prompts]
        cells = {}
        for temperature in (0.0, 1.0):
            params = [
                SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=i, ignore_eos=True)
                for i in range(len(prompts))
            ]
            contenders = {"off": Contender(llm, None)}
            for label, settings in (("chosen", {}), ("fixed 3", {"adaptive": False, "num_speculative_tokens": 3})):
                contenders[label] = Contender(llm, spec | settings)
                contenders[label].speculation.model = speculation.model
            cell = race(contenders, prompts, params, options.rounds)
            fixed = contenders["fixed 3"].speculation
            rows = fixed.drafted / 3
            cell["accepted"] = [count / rows for count in fixed.accepted_at[:3]]
            cells[f"{temperature:g}"] = cell
            speeds = {label: round(cell[label]["over_off"]["median"], 3) for label in contenders}
            equal = [cell[label]["equal"] for label in contenders]
            print(name, temperature, [round(each, 3) for each in cell["accepted"]], speeds, equal, flush=True)
        found["heads"]["trained" if name == "run/last" else name] = cells
        del llm
    record.write(options.out or record.RESULTS / "cpu" / "eagle.json", found)


def eagle_table(result: dict[str, Any]) -> str:
    """Format the acceptance of both heads, by temperature."""
    training = result["training"]
    lines = [
        "| head | temperature | first draft accepted | first two | all three | chosen over off | fixed 3 over off "
        "| same tokens |",
        "|---" * 8 + "|",
    ]
    for name, cells in result["heads"].items():
        for temperature, cell in cells.items():
            shares = " | ".join(f"{share:.0%}" for share in cell["accepted"])
            equal = "yes" if cell["chosen"]["equal"] and cell["fixed 3"]["equal"] else "NO"
            speeds = [cell[label]["over_off"] for label in ("chosen", "fixed 3")]
            ratios = " | ".join(f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" for each in speeds)
            lines.append(f"| {name} | {temperature} | {shares} | {ratios} | {equal} |")
    machine = result["environment"]
    trained = f"{training['steps']} steps of {training['tokens_a_step']} tokens, {training['seconds'] / 60:.0f} minutes"
    where = f"{machine['cores']} cores of an {machine['processor']}, torch {machine['packages']['torch']}"
    made = f"`{result['command']}` after {trained} of training, on {where}, {record.made_at([machine])}."
    return "\n".join(lines) + f"\n\n{made}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "train", "measure"))
    parser.add_argument("--folder", type=Path, required=True, help="of the data and the heads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-tokens", type=int, default=576, help="tokens of an optimizer step")
    parser.add_argument("--answers", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--minutes", type=float, default=60, help="train for this long, and continue at the next call")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="one request at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    {"data": data, "train": train, "measure": measure}[options.what](options)


if __name__ == "__main__":
    main()
