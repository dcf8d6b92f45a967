"""Measure the cost of token probabilities on the CPU, as the page's chats ask for them: tokens per second with the five
likeliest tokens of each place and without them, in turns.

    python benchmarks/engine/probabilities_cost.py [--rounds 16] [--out FILE]

A round is four runs: without, with, with, without; a drift of the machine cancels within it. The ratio is that of the
two pairs; the result is the geometric mean over the rounds, with its 95% interval (Student's t of the logarithms). A
run takes about two minutes. Writes benchmarks/results/cpu/token_probabilities.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams
from transect.bench.intervals import student_quantile

CHATS = (1, 8)
TOKENS = 48
ALTERNATIVES = 5


def seconds(llm: LLM, chats: int, alternatives: int | None) -> float:
    """Return the seconds of some answers."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.7, seed=1, logprobs=alternatives)
    began = time.perf_counter()
    llm.generate([f"Number {number}: once upon a time" for number in range(chats)], params)
    return time.perf_counter() - began


def compare(llm: LLM, chats: int, rounds: int) -> dict[str, Any]:
    """Run the rounds; returns tokens per second and the ratio."""
    for alternatives in (None, ALTERNATIVES):
        seconds(llm, chats, alternatives)
    rates: dict[int | None, list[float]] = {None: [], ALTERNATIVES: []}
    logs = []
    for _ in range(rounds):
        times = [seconds(llm, chats, each) for each in (None, ALTERNATIVES, ALTERNATIVES, None)]
        logs.append(math.log((times[0] + times[3]) / (times[1] + times[2])))
        for took, each in zip(times, (None, ALTERNATIVES, ALTERNATIVES, None), strict=True):
            rates[each].append(chats * TOKENS / took)
    mean = statistics.fmean(logs)
    half = student_quantile(0.95, rounds - 1) * statistics.stdev(logs) / math.sqrt(rounds)
    return {
        "chats": chats,
        "tokens_per_s_without": record.summary(rates[None]),
        "tokens_per_s_with": record.summary(rates[ALTERNATIVES]),
        "ratio": {"mean": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "token_probabilities.json")
    given = parser.parse_args()
    llm = LLM(given.model, max_num_seqs=max(CHATS), max_model_len=512)
    rows = [compare(llm, chats, given.rounds) for chats in CHATS]
    result = {"command": record.command("benchmarks/engine/probabilities_cost.py"), "rows": rows}
    record.write(given.out, result | record.environment())
    print(rows)


if __name__ == "__main__":
    main()
