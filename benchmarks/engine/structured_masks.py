"""Host time for the masks of a step's rows: one after another as long as that is fast, and by threads alone.

Every row writes an array of objects that has no end; a token of each is drawn by chance. Both ways make masks of the
same rows, in turns: each makes those of every second step. No model runs.

    python benchmarks/engine/structured_masks.py [--rows 1 8 64 256] [--steps 200]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.structured_cost import FORM
from transect.checkpoints.resolve import resolve
from transect.text.grammar.compiler import GrammarCompiler
from transect.text.grammar.constraint import MaskFiller
from transect.text.grammar.vocabulary import Vocabulary
from transect.text.tokenizer import Tokenizer

WAYS = {"threads": MaskFiller(alone_s=0.0), "in turn": MaskFiller()}


def host_cost(compiler: GrammarCompiler, size: int, rows: int, steps: int) -> dict[str, Any]:
    """Measure the milliseconds of a step: masks in both ways, and passing the tokens to the grammars."""
    grammars = [compiler.compile(FORM) for _ in range(rows)]
    words = np.zeros((rows, -(-size // 32)), np.int32)
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {name: [] for name in (*WAYS, "tokens")}
    for step in range(steps):
        name = list(WAYS)[step % len(WAYS)]
        began = time.perf_counter()
        WAYS[name](grammars, words)
        taken[name].append(1e3 * (time.perf_counter() - began))
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        tokens = [int(rng.choice(np.flatnonzero(row))) for row in bits]
        began = time.perf_counter()
        for grammar, token in zip(grammars, tokens, strict=True):
            grammar.accept(token)
        taken["tokens"].append(1e3 * (time.perf_counter() - began))
    return {name: record.summary(values) for name, values in taken.items()}


def table(result: dict[str, Any]) -> str:
    """Format the masks of a step in both ways, by rows."""
    lines = ["| rows | masks by threads | masks in turn | per row | accepting tokens |", "|---|---|---|---|---|"]
    for rows, row in result["rows"].items():
        threads, turn, tokens = (row[name]["median"] for name in ("threads", "in turn", "tokens"))
        each = 1e3 * turn / int(rows)
        lines.append(f"| {rows} | {threads:.2f} ms | {turn:.2f} ms | {each:.1f} µs | {tokens:.2f} ms |")
    machine = result["environment"]
    made = f"{machine['processor']}, {machine['cores']} cores, {record.made_at([machine])}"
    return "\n".join(lines) + f"\n\nTokenizer of {result['model']}, {made}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "structured_masks.json")
    options = parser.parse_args()
    source = resolve(options.model)
    size = source.config.vocab_size
    vocabulary = Vocabulary.of(Tokenizer.from_source(source), source.config.eos_token_ids, size)
    compiler = GrammarCompiler(lambda: vocabulary, checked=False)
    found = {rows: host_cost(compiler, size, rows, options.steps) for rows in options.rows}
    result = {
        "command": "python benchmarks/engine/structured_masks.py",
        "environment": record.environment(),
        "model": options.model,
        "unit": "milliseconds a step",
        "rows": found,
    }
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
