"""Measure scores of many queries for one document on the CPU, by log-probabilities of the query or of the whole prompt.

    python benchmarks/engine/shared_document.py [--rounds 4] [--out FILE]

Queries of a document of about ``--tokens`` tokens are scored as ``/v1/score`` does: in one request, whose pairs run
together, and one request after another. A round is four runs for each: whole, query, query, whole; a drift of the
machine cancels within it. Each run begins with an empty prefix cache. The ratio is that of the processor time of the
two pairs; the result is the geometric mean over the rounds, with its 95% interval (Student's t of the logarithms). The
scores must be equal to the bit. Four rounds take 17 minutes of processor time. Writes
benchmarks/results/cpu/shared_document.json.
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
from transect import LLM
from transect.bench.intervals import student_quantile
from transect.engine.frontends.scoring import PARAMS, pair_token_ids, score

PLACES = ("harbour", "mill", "library", "market", "bridge", "garden", "station", "school", "tower", "bakery")


def prompts_of(llm: LLM, tokens: int) -> tuple[list[list[int]], list[int]]:
    """Return a prompt for each query of one document of about ``tokens`` tokens, and the tokens of each query."""
    text, number = "", 0
    while len(llm.tokenizer.encode(text)) < tokens:
        number += 1
        text += f"In year {number} of the town the {PLACES[number % len(PLACES)]} was rebuilt by {number * 7} people. "
    pairs = [pair_token_ids(f"Who rebuilt the {place}?", text, llm.tokenizer.encode) for place in PLACES]
    return [ids for ids, _ in pairs], [count for _, count in pairs]


def run(
    llm: LLM, prompts: list[list[int]], counts: list[int], *, whole: bool, together: bool
) -> tuple[float, list[float]]:
    """Return the seconds of processor time that the scores take, and the scores."""
    llm.reset_prefix_cache()
    starts = [0 if whole else len(ids) - count for ids, count in zip(prompts, counts, strict=True)]
    params = [PARAMS.with_(prompt_logprobs_start=start) for start in starts]
    began = time.process_time()
    if together:
        results = llm.generate(prompts, params)
    else:
        results = [llm.generate([ids], each)[0] for ids, each in zip(prompts, params, strict=True)]
    took = time.process_time() - began
    return took, [score(result, count) for result, count in zip(results, counts, strict=True)]


def compare(llm: LLM, tokens: int, rounds: int, *, together: bool) -> dict[str, Any]:
    """Run the rounds.

    Raises:
        RuntimeError: the scores differ.
    """
    prompts, counts = prompts_of(llm, tokens)
    _, expected = run(llm, prompts, counts, whole=True, together=together)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    logs = []
    for _ in range(rounds):
        times = []
        for whole in (True, False, False, True):
            took, scores = run(llm, prompts, counts, whole=whole, together=together)
            if scores != expected:
                raise RuntimeError(f"scores differ: {scores} and {expected}")
            times.append(took)
            seconds[whole].append(took)
        logs.append(math.log((times[0] + times[3]) / (times[1] + times[2])))
    mean = statistics.fmean(logs)
    half = student_quantile(0.95, rounds - 1) * statistics.stdev(logs) / math.sqrt(rounds)
    return {
        "together": together,
        "queries": len(prompts),
        "prompt_tokens": statistics.median(map(len, prompts)),
        "query_tokens": statistics.median(counts),
        "processor_s_whole": record.summary(seconds[True]),
        "processor_s_query": record.summary(seconds[False]),
        "ratio": {"mean": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)},
    }


def table(result: dict[str, Any]) -> str:
    """Say how much processor time is saved."""
    said = [
        f"{row['ratio']['mean']:.1f} ({row['ratio']['low']:.1f} to {row['ratio']['high']:.1f}) times less "
        f"{'if they come together' if row['together'] else 'if they come one after another'}"
        for row in result["rows"]
    ]
    row = result["rows"][0]
    document = row["prompt_tokens"] - row["query_tokens"]
    return (
        f"{row['queries']} queries for one document of {document:,.0f} tokens take less processor time than with "
        f"log-probabilities of the whole prompts: {', '.join(said)}. The scores are equal to the bit "
        f"(`{result['command']}`, {row['processor_s_query']['runs']} pairs of runs, {result['model']} on "
        f"{result['cores']} cores of an {result['processor']}, {record.made_at([result])}).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "shared_document.json")
    given = parser.parse_args()
    llm = LLM(given.model, max_model_len=given.tokens + 256)
    rows = [compare(llm, given.tokens, given.rounds, together=together) for together in (True, False)]
    result = {"command": record.command("benchmarks/engine/shared_document.py"), "model": given.model, "rows": rows}
    record.write(given.out, result | record.environment())
    print(rows)


if __name__ == "__main__":
    main()
