"""Speculative decoding beside the same engine without, at planted and at real acceptance; answers are compared.

    python benchmarks/engine/speculation.py grid [--model MODEL] [--dummy] [--batches 1 4 16] [--rounds 7] [--out FILE]
    python benchmarks/engine/speculation.py tasks
    python benchmarks/engine/speculation.py pair --draft DIRECTORY

``grid`` plants the acceptance: the answers are given, and the drafter knows them but for a given share of positions; in
the row "shift" it is right in the first half of each answer and wrong in the second. The chosen number of drafts
stands beside fixed numbers. ``tasks`` runs the shipped drafters on texts that repeat more or less; "asked before"
has seen the same answer in the round before. ``pair`` lets a small model draft (``transect export --first-layers`` and
a distillation make one): its acceptance at several temperatures, with the noise of the large model as shipped, and what
rejection sampling would accept on the same texts. Contenders take turns within each round; ratios are of one round.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.engine.executors.drafted import Drafted
from transect.engine.scheduling.batch import ScheduledBatch, StepResult
from transect.engine.scheduling.drafters.drafter import Guess
from transect.engine.scheduling.drafters.registry import SpeculativeConfig
from transect.engine.scheduling.policies.model_speculation import speculation_of
from transect.models.context import VarlenContext

FIXED = (2, 4, 8)
"""Fixed numbers of drafts of the grid."""
CHANCES = ("0", "0.3", "0.6", "0.9", "1", "shift")
CODE = '''def area_of_circle(radius):
    """Return the area of a circle."""
    if radius < 0:
        raise ValueError("radius must not be negative")
    return 3.14159 * radius * radius

def area_of_square(side):
    """Return the area of a square."""
    if side < 0:
        raise ValueError("side must not be negative")
    return side * side

'''
TEXT = (
    "The lighthouse stood on the northern cliff for two hundred years. Every evening the keeper climbed the stairs, "
    "lit the lamp, and wrote the weather into a book. In winter the storms reached the windows, and ships waited in "
    "the bay until the morning. When the lamp was replaced by an electric one, the keeper stayed to write the book."
)
TASKS: dict[str, str] = {
    "edit a text": f"Repeat this text, but write 'tower' for 'lighthouse':\n{TEXT}\n\nHere is the text:\n{TEXT[:60]}",
    "code with repeats": CODE + CODE.replace("area", "perimeter") + "def volume_of_cube(side):\n",
    "chat over a document": (
        f"Document:\n{TEXT}\n\nQuestion: What did the keeper do every evening? Quote the document.\nAnswer:"
    ),
    "a list that repeats": "1. red apple\n2. red apple\n3. red apple\n4. red apple\n5. red apple\n6.",
    "prose that does not repeat": "Write down an unusual thought about each of ten different countries.\n1.",
}


class Planted:
    """Knows what each sequence will say, and is wrong where it should be."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], chance: str) -> None:
        self.answers = answers
        self.wrong = {}
        for at, (prompt, answer) in enumerate(answers.items()):
            chances = random.Random(at)
            share = [float(chance)] * len(answer) if chance != "shift" else [1.0] * (len(answer) // 2)
            self.wrong[prompt] = [chances.random() >= (share[i] if i < len(share) else 0.0) for i in range(len(answer))]

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        now = slice(len(output), len(output) + most)
        pairs = zip(self.answers[prompt][now], self.wrong[prompt][now], strict=True)
        tokens = tuple(token ^ 1 if wrong else token for token, wrong in pairs)
        return Guess(tokens, (1.0,) * len(tokens), 4)

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Keep nothing."""


class Told(Drafted):
    """Runs steps as they are, and reports the known answers in place of what was drawn.

    With random weights logits are nearly equal, and another number of rows changes draws: planted guesses would be
    wrong after the first such draw. The device does the same work.
    """

    def __init__(self, executor: Any, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(executor)
        self.answers = answers

    def submit(self, batch: ScheduledBatch) -> Any:
        handle = super().submit(batch)
        read = handle.result

        def result() -> StepResult:
            found = read()
            for row in batch.rows:
                answer = self.answers[row.prompt_token_ids]
                at = row.known_end - len(row.prompt_token_ids)
                right = 0
                while right < len(row.drafts) and row.drafts[right] == answer[at + right]:
                    right += 1
                for draw in row.draws:
                    found.tokens[draw.seq_id] = answer[at + right]
                    if row.drafts:
                        found.accepted[draw.seq_id] = answer[at : at + right]
            return found

        return SimpleNamespace(draw=handle.draw, result=result)


class Contender:
    """An engine with one way of speculation, or none."""

    def __init__(self, llm: LLM, settings: dict[str, Any] | None, *, forgets: bool = False) -> None:
        self.llm, self.forgets = llm, forgets
        self.scheduler = llm._core.scheduler
        self.speculation = None
        if settings is not None:
            self.speculation = speculation_of(SpeculativeConfig.of(settings), self.scheduler.times)

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
        """Measure the seconds from the first decode on, and return the answers."""
        self.scheduler.speculation = self.speculation
        if self.forgets:
            self.speculation.drafter = self.speculation.config.drafter()
        began = time.perf_counter()
        results = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return time.perf_counter() - began, [result.outputs[0].token_ids for result in results]


def interval(ratios: list[float]) -> dict[str, float]:
    """Return the median, and the 95% interval of the mean by Student's t (two-sided)."""
    mean, count = statistics.mean(ratios), len(ratios)
    t = {3: 4.30, 5: 2.78, 7: 2.45, 9: 2.31, 11: 2.23, 15: 2.14}.get(count, 2.1)
    half = t * statistics.stdev(ratios) / math.sqrt(count) if count > 1 else math.nan
    return {"median": statistics.median(ratios), "low": mean - half, "high": mean + half}


def race(contenders: dict[str, Contender], prompts, params, rounds: int, warm: int = 1) -> dict[str, Any]:
    """Measure the seconds of each round, the speed of each relative to ``off`` in its round, and compare the
    answers. ``warm``: rounds before those, which warm up and learn step times."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    equal = dict.fromkeys(contenders, True)
    for turn in range(warm + rounds):
        answers = {}
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took, answers[name] = contenders[name].run(prompts, params)
            if turn >= warm:
                seconds[name].append(took)
        for name in names:
            equal[name] = equal[name] and answers[name] == answers["off"]
    tokens = sum(map(len, answers["off"]))
    found: dict[str, Any] = {"tokens": tokens}
    for name, times in seconds.items():
        ratios = [off / own for off, own in zip(seconds["off"], times, strict=True)]
        found[name] = {"seconds": record.summary(times), "over_off": interval(ratios), "equal": equal[name]}
    return found


def grid(llm: LLM, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure every batch size and planted acceptance, and keep the cells so far after each."""
    core = llm._core
    found: dict[str, Any] = {}
    for rows in options.batches:
        numbers = random.Random(rows)
        prompts = [[numbers.randrange(300, 30_000) for _ in range(options.prompt)] for _ in range(rows)]
        params = [
            SamplingParams(max_tokens=options.tokens, temperature=0.7, seed=i, ignore_eos=True) for i in range(rows)
        ]
        off = Contender(llm, None)
        known = {
            tuple(prompt): [numbers.randrange(300, 30_000) for _ in range(options.tokens + 1)] for prompt in prompts
        }
        core.executor = Told(getattr(core.executor, "_executor"), known)  # noqa: B009
        for chance in options.chances:
            contenders = {"off": off, "chosen": Contender(llm, {"method": "ngram", "num_speculative_tokens": 8})}
            for count in options.fixed:
                fixed = {"method": "ngram", "num_speculative_tokens": count, "adaptive": False}
                contenders[f"fixed {count}"] = Contender(llm, fixed)
            for name, contender in contenders.items():
                if name != "off":
                    contender.speculation.drafter = Planted(known, chance)
            found[f"{rows} x {chance}"] = cell = race(contenders, prompts, params, options.rounds)
            best = max(cell[name]["over_off"]["median"] for name in contenders if name != "chosen")
            cell["best"] = best
            print(rows, chance, {name: round(cell[name]["over_off"]["median"], 3) for name in contenders}, flush=True)
            keep(found)
    return found


def tasks(llm: LLM, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure the shipped drafters on real texts, one request at a time."""
    found: dict[str, Any] = {}
    tokenizer = llm.get_tokenizer()
    for name, prompt in TASKS.items():
        ids = [tokenizer.encode(prompt)]
        params = [SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)]
        contenders = {"off": Contender(llm, None)}
        contenders |= {method: Contender(llm, {"method": method}, forgets=True) for method in ("ngram", "suffix")}
        contenders["suffix, asked before"] = Contender(llm, {"method": "suffix"})
        found[name] = race(contenders, ids, params, options.rounds)
        medians = {each: round(found[name][each]["over_off"]["median"], 2) for each in contenders}
        print(name, medians, [found[name][each]["equal"] for each in contenders], flush=True)
        keep(found)
    return found


def pair(llm: LLM, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a model that drafts: acceptance of its first drafts by temperature, and speed over off."""
    found: dict[str, Any] = {}
    tokenizer = llm.get_tokenizer()
    speculation = llm._core.scheduler.speculation
    prompts = [tokenizer.encode(text) for text in TASKS.values()]
    for temperature in options.temperatures:
        params = [
            SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        contenders = {"off": Contender(llm, None)}
        for name, settings in (("chosen", {}), ("fixed 3", {"adaptive": False, "num_speculative_tokens": 3})):
            contenders[name] = Contender(llm, {"method": "draft_model", "model": options.draft, **settings})
            contenders[name].speculation.model = speculation.model
        cell = race(contenders, prompts, params, options.rounds)
        fixed = contenders["fixed 3"].speculation
        rows = fixed.drafted / 3
        cell["accepted"] = [count / rows for count in fixed.accepted_at]
        cell |= coupling(options.model, options.draft, prompts, max(temperature, 1e-3))
        found[f"{temperature:g}"] = cell
        print(temperature, cell["accepted"], cell["same_noise"], cell["rejection"], flush=True)
        keep(found)
    return found


@torch.inference_mode()
def coupling(model: str, draft: str, texts: list[list[int]], temperature: float, draws: int = 64) -> dict[str, float]:
    """Mean acceptance of a draft over the positions of texts: drawn with the same noise, and by rejection sampling."""
    logits = []
    for name in (model, draft):
        source = resolve(name)
        decoder = load_model(source, dtype="float32", native=False)
        rows = []
        for tokens in texts:
            ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
            hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), VarlenContext(ends, decoder.ops))
            rows.append(decoder.logits(hidden))
        logits.append(torch.log_softmax(torch.cat(rows) / temperature, -1))
    p, q = logits
    rejection = torch.minimum(p.exp(), q.exp()).sum(-1).mean()
    same, generator = 0.0, torch.Generator().manual_seed(1)
    for _ in range(draws):
        noise = -torch.empty_like(p[:1]).exponential_(generator=generator).log()
        same += float(((p + noise).argmax(-1) == (q + noise).argmax(-1)).float().mean())
    return {"same_noise": same / draws, "rejection": float(rejection)}


def pair_table(result: dict[str, Any]) -> str:
    """Acceptance and speed of a model that drafts, by temperature."""
    lines = [
        "| temperature | first drafts accepted | of the second, third | same noise, on texts | rejection, on texts "
        "| chosen over off | fixed 3 over off | same tokens |",
        "|---" * 8 + "|",
    ]
    for name, cell in result["cells"].items():
        first, *later = cell["accepted"]
        more = ", ".join(f"{share:.0%}" for share in later)
        speeds = [f"{cell[each]['over_off']['median']:.2f}" for each in ("chosen", "fixed 3")]
        equal = "yes" if cell["chosen"]["equal"] and cell["fixed 3"]["equal"] else "NO"
        shares = f"{first:.0%} | {more} | {cell['same_noise']:.0%} | {cell['rejection']:.0%}"
        lines.append(f"| {name} | {shares} | {speeds[0]} | {speeds[1]} | {equal} |")
    return "\n".join(lines) + "\n\n" + _made(result)


def grid_table(result: dict[str, Any]) -> str:
    """Format the speed relative to the engine without drafts, by rows and planted acceptance."""
    columns = ["chosen", *(f"fixed {count}" for count in FIXED)]
    lines = [
        f"| sequences | acceptance | {' | '.join(columns)} | chosen over the best |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for name, cell in sorted(result["cells"].items(), key=lambda item: int(item[0].split(" x ")[0])):
        rows, chance = name.split(" x ")
        chosen = cell["chosen"]["over_off"]
        ratios = [f"{chosen['median']:.2f} ({chosen['low']:.2f} to {chosen['high']:.2f})"]
        ratios += [f"{cell[column]['over_off']['median']:.2f}" if column in cell else "" for column in columns[1:]]
        lines.append(f"| {rows} | {chance} | {' | '.join(ratios)} | {chosen['median'] / cell['best']:.0%} |")
    return "\n".join(lines) + "\n\n" + _made(result)


def bars_table(results: dict[str, dict[str, Any]]) -> str:
    """Format how often the chosen number misses what it should reach, by result with its name.

    Args:
        results: cells of each; the fixed numbers are their contenders ``fixed ...``.
    """
    lines = [
        "| measured | cells | below 0.98 of off | lowest | below 95% of the best number, 0 included | lowest |",
        "|---" * 6 + "|",
    ]
    for name, cells in results.items():
        beside_off = {key: cell["chosen"]["over_off"]["median"] for key, cell in cells.items()}
        best = {
            key: max([1.0, *(cell[each]["over_off"]["median"] for each in cell if each.startswith("fixed"))])
            for key, cell in cells.items()
        }
        beside_best = {key: ratio / best[key] for key, ratio in beside_off.items()}
        shown = [len(cells)]
        for ratios, bar, form in ((beside_off, 0.98, ".2f"), (beside_best, 0.95, ".0%")):
            low = min(ratios, key=lambda key, ratios=ratios: ratios[key])
            shown += [sum(round(ratio, 2) < bar for ratio in ratios.values()), f"{ratios[low]:{form}} ({low})"]
        lines.append(f"| {name} | {' | '.join(map(str, shown))} |")
    return "\n".join(lines) + "\n"


def tasks_table(result: dict[str, Any]) -> str:
    """Format the speed relative to the engine without drafts, by task."""
    columns = ["ngram", "suffix", "suffix, asked before"]
    lines = [f"| task | {' | '.join(columns)} | same tokens |", "|---" * (len(columns) + 2) + "|"]
    for name, cell in result["cells"].items():
        ratios = [f"{cell[column]['over_off']['median']:.2f}" for column in columns]
        equal = all(cell[column]["equal"] for column in columns)
        lines.append(f"| {name} | {' | '.join(ratios)} | {'yes' if equal else 'NO'} |")
    return "\n".join(lines) + "\n\n" + _made(result)


def _made(result: dict[str, Any]) -> str:
    machine = result["environment"]
    where = result.get("device") or f"{machine['cores']} cores of an {machine['processor']}"
    made = record.made_at([*result.get("earlier", ()), machine])
    return f"`{result['command']}` on {where}, torch {machine['packages']['torch']}, {made}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("grid", "tasks", "pair"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--chances", nargs="+", default=CHANCES)
    parser.add_argument("--fixed", type=int, nargs="+", default=FIXED, help="fixed numbers of drafts to compare with")
    parser.add_argument("--draft", help="the model that drafts, of pair")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.5, 1.0, 1.5))
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--add", action="store_true", help="keep the other cells of the result file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = max(options.batches) if options.what == "grid" else 1
    settings: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": max(4 * rows, 16), "seed": 1}
    settings |= {"load_format": "dummy"} if options.dummy else {}
    drafter = {"method": "ngram"} if options.what != "pair" else {"method": "draft_model", "model": options.draft}
    llm = LLM(
        options.model,
        speculative_config=drafter,
        enable_prefix_caching=False,
        deterministic=options.deterministic,
        **settings,
    )
    device = "cuda" if torch.cuda.is_available() and llm.config.device != "cpu" else "cpu"
    out = options.out or record.RESULTS / ("h200" if device == "cuda" else "cpu") / f"speculation_{options.what}.json"
    found: dict[str, Any] = {"model": Path(options.model).name, "tokens": options.tokens, "cells": {}}
    found["environment"] = record.environment()
    command = record.command("benchmarks/engine/speculation.py")
    command = command.replace(options.model, Path(options.model).name).replace(str(options.out), "FILE")
    found["command"] = command.replace(str(options.draft), "DIRECTORY")
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    others: dict[str, Any] = {}
    if options.add and out.exists():
        before = json.loads(out.read_text())
        others, found["command"] = before["cells"], f"{before['command']} && {found['command']}"
        found["earlier"] = [*before.get("earlier", ()), before["environment"]]

    def keep(cells: dict[str, Any]) -> None:
        """Write what is measured so far: a run may be cut off."""
        record.write(out, found | {"cells": others | cells})

    {"grid": grid, "tasks": tasks, "pair": pair}[options.what](llm, options, keep)


if __name__ == "__main__":
    main()
