"""Cost of a grammar for a decode step: the same rows with and without, alternately, in one engine.

Every row writes an array of objects that has no end, so all of them stay under the grammar. Beside the time of a step:
what the host spends on the masks and on telling the grammars of the tokens, measured alone.

    python benchmarks/engine/structured_cost.py [--model smollm2-135m] [--rows 1 8 64] [--out ...]
    python benchmarks/engine/structured_cost.py --device cuda --model DIR --out
    benchmarks/results/h200/structured_cost.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams
from transect.text.grammar.constraint import MaskFiller
from transect.text.grammar.params import StructuredOutputsParams

PROMPT = "Write a very long JSON array of people with their names, ages and home towns.\n"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "town": {"enum": ["Oslo", "Rome", "Lima"]}},
    "required": ["name", "age", "town"],
    "additionalProperties": False,
}
FORM = StructuredOutputsParams(json={"type": "array", "items": PERSON, "minItems": 10_000})


def steps(llm: LLM, rows: int, form: StructuredOutputsParams | None, count: int) -> list[float]:
    """Measure the milliseconds of steps in which all rows decode."""
    params = SamplingParams(max_tokens=count + 40, temperature=1.0, seed=1, ignore_eos=True, structured_outputs=form)
    prompt = llm.get_tokenizer().encode(PROMPT)
    names = [llm.submit([*prompt, *prompt[: row % 8]], params) for row in range(rows)]
    begun: set[str] = set()
    while len(begun) < rows:
        begun |= {output.request_id for output in llm.step() if output.new_token_ids}
    for _ in range(8):
        llm.step()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        llm.step()
        taken.append(1e3 * (time.perf_counter() - began))
    for name in names:
        llm.abort(name)
    while llm.has_work:
        llm.step()
    return taken


def host_cost(llm: LLM, rows: int, count: int) -> dict[str, Any]:
    """Measure the milliseconds for the masks of all rows, and for a token of each, step after step."""
    grammars = [llm._grammars.compile(FORM) for _ in range(rows)]
    words = np.zeros((rows, -(-llm.vocab_size // 32)), np.int32)
    fill, rng = MaskFiller(), np.random.default_rng(0)
    masks, accepts = [], []
    for _ in range(count):
        began = time.perf_counter()
        fill(grammars, words)
        made = time.perf_counter()
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        tokens = [int(rng.choice(np.flatnonzero(row))) for row in bits]
        chosen = time.perf_counter()
        for grammar, token in zip(grammars, tokens, strict=True):
            grammar.accept(token)
        accepts.append(1e3 * (time.perf_counter() - chosen))
        masks.append(1e3 * (made - began))
    return {"masks_ms": record.summary(masks), "accept_ms": record.summary(accepts)}


def table(result: dict[str, Any]) -> str:
    """Format the cost of grammars for a step, by rows."""
    lines = ["| rows | ms per step | with grammars | difference | masks only, on the host |", "|---|---|---|---|---|"]
    for rows, row in result["rows"].items():
        free, constrained, masks = (x["median"] for x in (row["free"], row["constrained"], row["host"]["masks_ms"]))
        lines.append(f"| {rows} | {free:.2f} | {constrained:.2f} | {row['extra_percent']:.1f}% | {masks:.2f} |")
    machine = result["environment"]
    return "\n".join(lines) + f"\n\n{result['model']}, {machine['gpu']}, {record.made_at([machine])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "structured_cost.json")
    options = parser.parse_args()
    most = max(options.rows)
    context = options.steps + 256
    llm = LLM(
        options.model,
        device=options.device,
        load_format=options.load_format,
        max_num_seqs=most,
        max_model_len=context,
        kv_cache_tokens=(most + 1) * context,
    )
    found = {}
    for rows in options.rows:
        for form in (None, FORM):
            steps(llm, rows, form, 4)  # grammars and graphs are made here
        taken: dict[str, list[float]] = {"free": [], "constrained": []}
        for _ in range(options.rounds):
            taken["free"].append(float(np.median(steps(llm, rows, None, options.steps))))
            taken["constrained"].append(float(np.median(steps(llm, rows, FORM, options.steps))))
        summaries = {name: record.summary(values) for name, values in taken.items()}
        extra = summaries["constrained"]["median"] / summaries["free"]["median"] - 1
        found[rows] = {**summaries, "extra_percent": 100 * extra, "host": host_cost(llm, rows, options.steps)}
        print(rows, "rows:", found[rows], flush=True)
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    result = {
        "command": f"python benchmarks/engine/structured_cost.py --model {Path(options.model).name}",
        "environment": record.environment() | gpu,
        "model": Path(options.model).name,
        "kernels": llm.kernels,
        "unit": "milliseconds a step",
        "rows": found,
    }
    record.write(options.out, result)


if __name__ == "__main__":
    main()
