"""Replay rules that stop a vote early over recorded answers: equal answers, accuracy and tokens beside the full vote.

    python benchmarks/engine/search_stopping.py draw ANSWERS [--model MODEL] [--families add puzzle lot] [--tasks 100]
    python benchmarks/engine/search_stopping.py replay ANSWERS [MORE ...] [--certainties 0.9 0.95 0.99] [--out FILE]

``draw`` records ``--n`` answers to each task, a few minutes a family on two cores; families that the file has already
are kept. ``replay`` needs no model: the shipping method takes the recorded answers in a shuffled order as its branches,
``--orders`` times for each task, and is compared with the vote over all of them. Both decide on the same answers, so
the difference is due to the rule alone; two votes over answers of different seeds also differ by luck. Writes
benchmarks/results/cpu/search_stopping.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from search_tasks import FAMILIES

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams, Search
from transect.search.extract import extract
from transect.search.machine import RunRequest, SearchRun
from transect.search.tree import Tree
from transect.text.output_processor import Update

MAX_TOKENS = 24
Answer = tuple[str, int]
"""Short answer of a branch, empty if it has none, and its number of tokens."""


def draw(options: argparse.Namespace) -> None:
    """Record answers to the tasks of each family."""
    found: dict[str, Any] = json.loads(options.answers.read_text()) if options.answers.exists() else {}
    names = [name for name in options.families if name not in found.get("families", {})]
    if not names:
        return
    llm = LLM(options.model, max_model_len=1024, max_num_seqs=64, seed=1)
    params = SamplingParams(n=options.n, max_tokens=MAX_TOKENS, temperature=options.temperature, seed=options.seed)
    found |= {"model": options.model, "temperature": options.temperature, "environment": record.environment()}
    for name in names:
        family = FAMILIES[name]
        tasks = family.tasks(options.tasks, options.seed)
        drawn = llm.chat(
            [task.messages for task in tasks],
            [params.with_(seed=1000 * options.seed + number) for number in range(len(tasks))],
        )
        rows = [
            {
                "right": task.answer,
                "answers": [extract(each.text, family.extract) or "" for each in output.outputs],
                "tokens": [len(each.token_ids) for each in output.outputs],
            }
            for task, output in zip(tasks, drawn, strict=True)
        ]
        found.setdefault("families", {})[name] = rows
        record.write(options.answers, found)
        print(f"{name}: {sum(sum(row['tokens']) for row in rows)} tokens", flush=True)


def vote(answers: list[Answer], search: Search) -> tuple[str, int]:
    """Run a search whose branches are the recorded answers, in order. Returns the winner and the tokens drawn."""
    run = SearchRun(
        search, Tree(), [1], SamplingParams(max_tokens=MAX_TOKENS, seed=1), seed=1, max_model_len=10_000,
        decode=lambda ids: "",
    )  # fmt: skip
    left = iter(answers)
    while not run.done:
        for each in run.take():
            if isinstance(each, RunRequest):
                for choice in range(each.params.n):
                    text, tokens = next(left)
                    ended = Update("", choice, text or " ", [0] * tokens, finish_reason="stop")
                    run.feed(each.key, ended)
    assert run.result is not None
    return run.result.branch.answer or "", run.tree.tokens


def replay(options: argparse.Namespace) -> None:
    """Compare rules with the full vote."""
    recorded = [json.loads(file.read_text()) for file in options.answers]
    families: dict[str, Any] = {}
    for name in recorded[0]["families"]:
        rows = [row for each in recorded for row in each["families"][name]]
        n = len(rows[0]["answers"])
        families[name] = {"tasks": len(rows), "n": n, "orders": options.orders, "certainties": {}}
        for certainty in options.certainties:
            search = Search("adaptive", n=n, wave=options.wave, certainty=certainty, extract="text")
            found = families[name]["certainties"][str(certainty)] = compare(rows, search, options.orders)
            print(f"{name}, certainty {certainty}: {described(found)}", flush=True)
    result = {key: recorded[0][key] for key in ("model", "temperature")}
    result |= {"command": "python benchmarks/engine/search_stopping.py", "environment": record.environment()}
    record.write(options.out, result | {"families": families})


def compare(rows: list[dict[str, Any]], search: Search, orders: int) -> dict[str, Any]:
    """Return shares of equal answers, accuracies and tokens over ``orders`` shuffled orders of each task's answers."""
    equal, early, full, spent, whole = 0, [], [], 0, 0
    for order in range(orders):
        rng = random.Random(order)
        right = {"early": 0, "full": 0}
        for row in rows:
            answers = list(zip(row["answers"], row["tokens"], strict=True))
            rng.shuffle(answers)
            winner, tokens = vote(answers, search)
            votes: dict[str, int] = {}
            for text, _ in answers:
                if text:
                    votes[text] = votes.get(text, 0) + 1
            expected = max(votes, key=lambda text: votes[text]) if votes else ""
            best = max(votes.values(), default=0)
            equal += votes.get(winner, 0) == best
            right["early"] += winner == row["right"]
            right["full"] += expected == row["right"]
            spent, whole = spent + tokens, whole + sum(row["tokens"])
        early.append(right["early"] / len(rows))
        full.append(right["full"] / len(rows))
    differences = [a - b for a, b in zip(early, full, strict=True)]
    return {
        "equal": equal / (orders * len(rows)),
        "accuracy": statistics.mean(early),
        "full_accuracy": statistics.mean(full),
        "difference": statistics.mean(differences),
        "difference_sd": statistics.stdev(differences) if orders > 1 else math.nan,
        "share_of_tokens": spent / whole,
    }


def described(found: dict[str, Any]) -> str:
    """Format a comparison."""
    return (
        f"equal to the full vote {found['equal']:.1%}, accuracy {found['accuracy']:.1%} beside "
        f"{found['full_accuracy']:.1%} ({100 * found['difference']:+.1f} points, one order +- "
        f"{100 * found['difference_sd']:.1f}), {found['share_of_tokens']:.0%} of the tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    drawing, replaying = kinds.add_parser("draw"), kinds.add_parser("replay")
    drawing.add_argument("answers", type=Path, help="file of recorded answers")
    replaying.add_argument("answers", type=Path, nargs="+", help="files of recorded answers")
    drawing.add_argument("--model", default="smollm2-135m")
    drawing.add_argument("--families", nargs="+", default=["add", "puzzle", "lot"], choices=sorted(FAMILIES))
    drawing.add_argument("--tasks", type=int, default=100)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--n", type=int, default=32)
    drawing.add_argument("--temperature", type=float, default=0.7)
    replaying.add_argument("--certainties", nargs="+", type=float, default=[0.9, 0.95, 0.99])
    replaying.add_argument("--wave", type=int, default=4)
    replaying.add_argument("--orders", type=int, default=20)
    replaying.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "search_stopping.json")
    options = parser.parse_args()
    {"draw": draw, "replay": replay}[options.kind](options)


if __name__ == "__main__":
    main()
