"""Do the parts add up: decode, prefill, mixed load, a training step and a recommender, each split into its causes.

    python benchmarks/explain/sums.py [--out ...]                                   # on a CPU, with a small model
    python benchmarks/explain/sums.py --model llama-3.1-8b --load-format dummy --train "full 1b" --traces FOLDER

Beside the parts stands a second reading of the same trace by other code: the file is parsed whole, and the stretches in
which kernels and copies (on a CPU: operators of the main thread) ran are merged. The parts must say the same, and the
wall time must be that of a stopwatch around the work.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams
from transect.explain import Explain
from transect.explain.program.explain import Explanation, machine_ceilings

BUSY = ("floor", "inefficiency", "unrated", "padding", "copies", "communication")
"""Parts in which a GPU does something."""
RANGE = "transect.explain"


def read_again(path: Path) -> dict[str, float]:
    """Read wall and busy seconds of a trace from its JSON alone."""
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]
    (window,) = (each for each in events if each["name"] == RANGE and each["cat"] == "user_annotation")
    begin, end = window["ts"], window["ts"] + window["dur"]
    on_gpu = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    of_host = [each for each in events if each.get("cat") == "cpu_op" and each["tid"] == window["tid"]]
    counted = on_gpu or of_host
    spans = np.array([(each["ts"], each["ts"] + each["dur"]) for each in counted]).clip(begin, end)
    spans = spans[np.argsort(spans[:, 0])]
    reached = np.maximum.accumulate(spans[:, 1])
    fresh = np.maximum(spans[:, 0], np.concatenate([[begin], reached[:-1]]))
    return {"wall_s": 1e-6 * (end - begin), "busy_s": 1e-6 * float(np.maximum(0, spans[:, 1] - fresh).sum())}


def look(name: str, work: Callable[[], object], folder: Path | None, **settings: Any) -> dict[str, Any]:
    """Explain one piece of work, which has run before: its parts, and the second reading."""
    work()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "trace.json"
        with Explain(trace=path, **settings) as run:
            began = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            stopwatch = time.perf_counter() - began
        other = read_again(path)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as plain, gzip.open(folder / f"{name.replace(' ', '_')}.json.gz", "wb") as packed:
                shutil.copyfileobj(plain, packed)
    assert run.result is not None
    found = summary(run.result, stopwatch, other)
    print(f"== {name}\n{run.result}\n{json.dumps({k: v for k, v in found.items() if k != 'parts'})}", flush=True)
    return found


def summary(found: Explanation, stopwatch: float, other: dict[str, float]) -> dict[str, Any]:
    """Summarize one piece of work for the record."""
    split = found.split
    gaps = sum(gap.end - gap.begin for gap in split.gaps)
    return {
        "wall_s": split.wall,
        "stopwatch_s": stopwatch,
        "parts": {part: seconds for part, seconds in split.parts.items() if seconds},
        "sum_of_parts_s": sum(split.parts.values()),
        "unexplained_share": split.share("unexplained"),
        "unrated_share": split.share("unrated"),
        "busy_s": split.wall - gaps,
        "second_reading": other,
    }


def engine_work(llm: LLM, rows: int, tokens: int) -> dict[str, Callable[[], object]]:
    """Decode, prefill and both together; prompts are of random tokens."""
    chance = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return chance.integers(10, 10_000, (count, length)).tolist()

    def params(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, ignore_eos=True, seed=1)

    def decode() -> None:
        llm.generate(prompts(rows, 4), params(tokens))

    def prefill() -> None:
        llm.generate(prompts(4, 16 * tokens), params(1))

    def mixed() -> None:
        left = prompts(rows, 4 * tokens)
        steps = 0
        while left or llm.has_work:
            if left and steps % 2 == 0:
                llm.submit(left.pop(), params(tokens // 2))
            llm.step()
            steps += 1

    return {"decode": decode, "prefill": prefill, "mixed load": mixed}


def recommender(device: str) -> Callable[[], object]:
    """Return the slow one of the examples."""
    sys.path.insert(0, str(record.ROOT / "examples" / "explain"))
    import recommender as example

    request = example.setting(device)
    return lambda: example.slow(*request)


def training(work: str) -> tuple[Callable[[], object], float]:
    """Return two steps of the trainer, on random tokens, and their floor in seconds: a trace does not show the products
    of merged layers."""
    from benchmarks.train.gpu import ROWS, SEQUENCE, WORK, trainer
    from transect.costs.training import flops_per_token

    run, steps = trainer(work), 2
    each = flops_per_token(run.trainable.source.config, SEQUENCE, frozen=WORK[work][1] != "pretrain")
    least = steps * ROWS * SEQUENCE * each / machine_ceilings().rate("bfloat16")
    return lambda: [run.step() for _ in range(steps)], least


def table(result: dict[str, Any]) -> str:
    """Format the parts in percent of the wall time, and the second reading."""
    found = result["work"]
    used = [
        part
        for part in BUSY_FIRST
        if any(each["parts"].get(part, 0) >= 5e-4 * each["wall_s"] for each in found.values())
    ]
    lines = [f"| | wall | {' | '.join(used)} | sum | busy | by the second reading |"]
    lines.append("|" + "---|" * (len(used) + 5))
    for name, each in found.items():
        wall = each["wall_s"]
        shares = (f"{each['parts'].get(part, 0) / wall:.1%}" for part in used)
        again = each["second_reading"]["busy_s"] / wall
        lines.append(
            f"| {name} | {1e3 * wall:.0f} ms | {' | '.join(shares)} | {each['sum_of_parts_s'] / wall:.1%} "
            f"| {each['busy_s'] / wall:.1%} | {again:.1%} |"
        )
    machine = result["environment"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    return "\n".join(lines) + f"\n\n{result['model']}, {where}, {record.made_at([machine])}.\n"


BUSY_FIRST = (*BUSY, "launch", "host", "sync", "loading", "recompilation", "profiler", "unexplained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--train", default="", help="one of train_gpu.WORK, such as 'full 1b'; none without a GPU")
    parser.add_argument("--traces", type=Path, help="keep the traces and the decision log in this folder")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "explain_sums.json")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    machine_ceilings()
    settings = {"decision_log": str(options.traces / "engine.log")} if options.traces else {}
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    llm = LLM(
        options.model,
        load_format=options.load_format,
        max_model_len=32 * options.tokens,
        max_num_seqs=options.rows,
        kv_cache_tokens=64 * options.tokens * options.rows,
        enable_prefix_caching=False,
        **settings,
    )
    result: dict[str, Any] = {
        "command": f"python benchmarks/explain/sums.py --model {options.model}",
        "environment": record.environment() | ({"gpu": torch.cuda.get_device_name()} if gpu else {}),
        "model": options.model,
        "work": {},
    }
    for name, work in engine_work(llm, options.rows, options.tokens).items():
        result["work"][name] = look(name, work, options.traces, decisions=llm.decisions)
        record.write(options.out, result)
    llm.close()
    del llm, work
    gc.collect()
    result["work"]["recommender"] = look("recommender", recommender("cuda" if gpu else "cpu"), options.traces)
    record.write(options.out, result)
    if options.train:
        steps, least = training(options.train)
        result["work"][f"training, {options.train}"] = look("training", steps, options.traces, floor_s=least)
        record.write(options.out, result)


if __name__ == "__main__":
    main()
