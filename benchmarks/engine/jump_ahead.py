"""Steps and time that are saved by not drawing the tokens that a grammar forces.

Each request fills in a form: JSON of a schema whose names are long, as those of tools and records are. The answers are
the same tokens in both ways, which is checked.

    python benchmarks/engine/jump_ahead.py [--model smollm2-135m] [--rows 1 8] [--out ...]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams
from transect.text.grammar.params import StructuredOutputsParams

RECORD = {
    "type": "object",
    "properties": {
        "customer_reference_number": {"type": "integer", "minimum": 1, "maximum": 99},
        "preferred_contact_channel": {"enum": ["telephone call", "electronic mail", "postal delivery"]},
        "subscription_renewal_requested": {"type": "boolean"},
        "outstanding_balance_currency": {"enum": ["EUR", "USD", "NOK"]},
        "escalate_to_human_operator": {"type": "boolean"},
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])  # type: ignore[call-overload]
FORM = StructuredOutputsParams(json=RECORD, disable_any_whitespace=True)
PROMPT = "Fill in the customer's record as JSON.\n"


def run(llm: LLM, rows: int) -> tuple[float, int, int, list[list[int]]]:
    """Return seconds, steps, tokens that were not drawn, and the answers."""
    params = [SamplingParams(max_tokens=200, seed=row, structured_outputs=FORM) for row in range(rows)]
    before = llm.stats()
    began = time.perf_counter()
    results = llm.generate([PROMPT] * rows, params)
    seconds = time.perf_counter() - began
    after = llm.stats()
    answers = [result.outputs[0].token_ids for result in results]
    return seconds, after.steps - before.steps, after.jumped_tokens - before.jumped_tokens, answers


def table(result: dict[str, Any]) -> str:
    """Format both ways, by rows."""
    lines = [
        "| rows | tokens of the answers | forced | steps, drawn one by one | steps | time |",
        "|---|---|---|---|---|---|",
    ]
    for rows, row in result["rows"].items():
        drawn, jumped = row["drawn"], row["jumped"]
        share = 100 * row["forced"] / row["tokens"]
        times = f"{1e3 * drawn['seconds']['median']:.0f} -> {1e3 * jumped['seconds']['median']:.0f} ms"
        lines.append(f"| {rows} | {row['tokens']} | {share:.0f}% | {drawn['steps']} | {jumped['steps']} | {times} |")
    machine = result["environment"]
    made = record.made_at([machine])
    return "\n".join(lines) + f"\n\n{result['model']}, {machine['processor']}, {machine['cores']} cores, {made}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "jump_ahead.json")
    options = parser.parse_args()
    settings = {"max_model_len": 512, "max_num_seqs": max(options.rows), "kv_cache_tokens": 512 * max(options.rows)}
    engines = {
        name: LLM(options.model, jump_ahead=on, enable_prefix_caching=False, **settings)
        for name, on in (("drawn", False), ("jumped", True))
    }
    found = {}
    for rows in options.rows:
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        steps, forced, answers = {}, {}, {}
        for turn in range(options.rounds + 1):
            for name, llm in engines.items():
                taken, steps[name], forced[name], answers[name] = run(llm, rows)
                if turn:  # the first compiles the grammar
                    seconds[name].append(taken)
        if answers["drawn"] != answers["jumped"]:
            raise SystemExit(f"{rows} rows: the answers are not the same")
        row: dict[str, Any] = {"tokens": sum(map(len, answers["jumped"])), "forced": forced["jumped"]}
        for name in engines:
            row[name] = {"steps": steps[name], "seconds": record.summary(seconds[name])}
        found[rows] = row
        print(rows, row, flush=True)
    result = {
        "command": "python benchmarks/engine/jump_ahead.py",
        "environment": record.environment(),
        "model": options.model,
        "kernels": engines["jumped"].kernels,
        "unit": "seconds for all answers",
        "rows": found,
    }
    record.write(options.out, result)


if __name__ == "__main__":
    main()
