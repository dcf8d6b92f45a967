"""Train an EAGLE-3 head for a small model, and measure its acceptance before and after. Distill a smaller model.

    python benchmarks/engine/eagle.py data --folder DIRECTORY
    python benchmarks/engine/eagle.py train --folder DIRECTORY [--minutes 4]
    python benchmarks/engine/eagle.py measure --folder DIRECTORY

``data`` draws answers of the model to beginnings of this project's pages, several to each where ``--answers`` asks for
more, and ``train`` trains a head on them; another call continues. ``measure`` lets the new head and the trained one
draft three tokens in each step, on beginnings of pages that the data do not have, greedy and at temperature 1, and then
lets the engine choose the number. "Off" is an engine without a head, and "paused" one that keeps features for its head
and never drafts. Each takes minutes on two cores. Contenders take turns within each round; ratios are of one round;
answers are compared. ``distill`` makes a model of the first layers and trains it on the same answers, to
draft for ``benchmarks/engine/speculation.py pair --draft DIRECTORY/small-run/last``; another call continues it too.

On a GPU, four minutes in all:

    python benchmarks/engine/eagle.py data --folder DIRECTORY --device cuda --answers 16000
    python benchmarks/engine/eagle.py train --folder DIRECTORY --device cuda --batch-tokens 16384 --steps 1500 \\
        --minutes 2
    python benchmarks/engine/eagle.py measure --folder DIRECTORY --device cuda --heads trained --batches 1 4 16 64 \\
        --deterministic
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.speculation import Contender, race
from transect import LLM, SamplingParams
from transect.train.config import TrainConfig
from transect.train.export.write import export_model, opened
from transect.train.loop.checkpoint import list_steps, newest
from transect.train.loop.trainer import Trainer

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
    rows = 256 if options.device == "cuda" else 32
    llm = LLM(options.model, device=options.device, max_model_len=512, max_num_seqs=rows)
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


def config_of(options: argparse.Namespace, run: str, **own: Any) -> TrainConfig:
    """Return the settings of a run on the answers of ``data``."""
    folder, batch = options.folder, options.batch_tokens
    return TrainConfig.from_dict(
        {
            "run_dir": str(folder / run),
            "steps": options.steps,
            "device": options.device,
            "precision": "mixed" if options.device == "cuda" else "float32",
            "data": {"train": [str(folder / "answers.jsonl")], "seq_len": min(batch, 1024), "micro_batch": batch},
            **own,
        }
    )


def head_config(options: argparse.Namespace, run: str) -> TrainConfig:
    """Return the settings of a head's run."""
    own = {"optimizer": {"learning_rate": 2e-3}, "eagle3": {"vocabulary": 4096, "steps": 3}}
    return config_of(options, run, model=options.model, objective="eagle3", **own)


def train(options: argparse.Namespace) -> None:
    """Train a head, and write a new one beside it."""
    new = Trainer(head_config(options, "new-run"))
    for line in new.objective.described():
        print(line, flush=True)
    new.trainable.snapshot()(options.folder / "new")
    del new
    record.write(options.folder / "training.json", run(options, head_config(options, "run")))


def distill(options: argparse.Namespace) -> None:
    """Make a model of the first layers, and train it to draw what the whole model draws."""
    small = options.folder / "small"
    if not small.exists():
        export_model(opened(options.model), small, "float32", first_layers=options.layers)
    own = {"optimizer": {"learning_rate": 1e-3}, "distill": {"teacher": options.model}}
    config = config_of(options, "small-run", model=str(small), objective="distill", **own)
    record.write(options.folder / "distilling.json", run(options, config) | {"layers": options.layers})


def run(options: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    """Train for the minutes of ``options``, or continue. Returns what the run has had so far."""
    checkpoint = newest(config.run_dir) if list_steps(config.run_dir) else None
    trainer = Trainer(config, checkpoint)
    kept = Path(config.run_dir) / "losses.json"
    losses: list[dict[str, float]] = json.loads(kept.read_text()) if checkpoint is not None else []
    began = time.perf_counter()

    class Listening:
        def step(self, found: Any) -> None:
            losses.append({"loss": found.loss, "seconds": found.seconds, **found.extra})
            if found.step % 10 == 1:
                shares = {k: round(v, 3) for k, v in found.extra.items()}
                print(found.step, round(found.loss, 3), shares, f"{found.tokens_per_second:,.0f} tokens/s", flush=True)

    trainer.run([Listening()], lambda: time.perf_counter() - began > 60 * options.minutes)
    kept.write_text(json.dumps(losses))
    first, last = (
        {name: sum(each[name] for each in part) / len(part) for name in part[0]} for part in (losses[:5], losses[-20:])
    )
    seconds = [each["seconds"] for each in losses]
    return {
        "steps": len(losses),
        "seconds": sum(seconds),
        "tokens_per_second": options.batch_tokens / statistics.median(seconds),
        "tokens_a_step": options.batch_tokens,
        "first_5": first,
        "last_20": last,
    }


def measure(options: argparse.Namespace) -> None:
    """Measure acceptance and speed of the new and of the trained head."""
    training = json.loads((options.folder / "training.json").read_text())
    command = record.command("benchmarks/engine/eagle.py").replace(str(options.folder), "DIRECTORY")
    found: dict[str, Any] = {"model": Path(options.model).stem, "training": training, "heads": {}}
    command = command.replace(options.model, Path(options.model).name).replace(str(options.out), "FILE")
    found |= {"environment": record.environment(), "command": command}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    out = options.out or record.RESULTS / ("h200" if options.device == "cuda" else "cpu") / "eagle.json"
    for name in options.heads:
        spec = {"method": "eagle3", "model": str(options.folder / {"trained": "run/last"}.get(name, name))}
        limits = {"device": options.device, "enable_prefix_caching": False, "max_model_len": 512, "seed": 1}
        limits |= {"max_num_seqs": 4 * max(options.batches), "deterministic": options.deterministic}  # a draft is a row
        if options.device == "cuda":
            limits["kv_cache_tokens"] = 512 * max(options.batches)  # there are two engines
        llm = LLM(options.model, speculative_config=spec, **limits)
        plain = LLM(options.model, **limits)
        speculation = llm._core.scheduler.speculation
        pages, cells = beginnings(llm, True), {}
        found["heads"][name] = cells
        for rows in options.batches:
            prompts = [pages[i * len(pages) // rows % len(pages)] for i in range(rows)]
            for temperature in (0.0, 1.0):
                params = [
                    SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=i, ignore_eos=True)
                    for i in range(rows)
                ]
                contenders = {"off": Contender(plain, None), "paused": Contender(llm, None)}
                for label, settings in (("chosen", {}), ("fixed 3", {"adaptive": False, "num_speculative_tokens": 3})):
                    contenders[label] = Contender(llm, spec | settings)
                    contenders[label].speculation.model = speculation.model
                # An engine captures graphs of prompts in its second run; off has one for itself.
                cell = race(contenders, prompts, params, options.rounds, warm=2)
                fixed = contenders["fixed 3"].speculation
                cell["accepted"] = [3 * count / max(1, fixed.drafted) for count in fixed.accepted_at[:3]]
                cell["drafted"] = contenders["chosen"].speculation.drafted
                cells[f"{rows} x {temperature:g}"] = cell
                speeds = {label: round(cell[label]["over_off"]["median"], 3) for label in contenders}
                equal = [cell[label]["equal"] for label in contenders]
                shares = [round(each, 3) for each in cell["accepted"]]
                print(name, rows, temperature, shares, speeds, equal, cell["drafted"], flush=True)
                record.write(out, found)
        del llm, plain


def eagle_table(result: dict[str, Any]) -> str:
    """Format the acceptance of both heads, by temperature."""
    training = result["training"]
    lines = [
        "| head | sequences | temperature | first draft accepted | first two | all three | chosen over off "
        "| paused over off | fixed 3 over off | same tokens |",
        "|---" * 10 + "|",
    ]
    for name, cells in result["heads"].items():
        for key, cell in sorted(cells.items(), key=lambda item: int(item[0].rpartition(" x ")[0] or 4)):
            rows, _, temperature = key.rpartition(" x ")
            shares = " | ".join(f"{share:.0%}" for share in cell["accepted"])
            equal = "yes" if cell["chosen"]["equal"] and cell["fixed 3"]["equal"] else "NO"
            speeds = [cell[label]["over_off"] if label in cell else None for label in ("chosen", "paused", "fixed 3")]
            ratios = " | ".join(
                f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" if each else "" for each in speeds
            )
            lines.append(f"| {name} | {rows or 4} | {temperature} | {shares} | {ratios} | {equal} |")
    machine = result["environment"]
    trained = f"{training['steps']} steps of {training['tokens_a_step']} tokens, {training['seconds'] / 60:.0f} minutes"
    where = result.get("device") or f"{machine['cores']} cores of an {machine['processor']}"
    where += f", torch {machine['packages']['torch']}"
    made = f"`{result['command']}` after {trained} of training, on {where}, {record.made_at([machine])}."
    return "\n".join(lines) + f"\n\n{made}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "train", "distill", "measure"))
    parser.add_argument("--folder", type=Path, required=True, help="of the data and the heads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-tokens", type=int, default=576, help="tokens of an optimizer step")
    parser.add_argument("--answers", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--minutes", type=float, default=60, help="train for this long, and continue at the next call")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=10, help="of the distilled model")
    parser.add_argument("--heads", nargs="+", choices=("new", "trained"), default=("new", "trained"))
    parser.add_argument("--batches", type=int, nargs="+", default=[4], help="sequences that decode together")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    {"data": data, "train": train, "distill": distill, "measure": measure}[options.what](options)


if __name__ == "__main__":
    main()
