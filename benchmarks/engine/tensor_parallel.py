"""Tensor parallelism on the GPUs of one host: what the links give, decode, throughput, beside floors and predictions.

    python benchmarks/engine/tensor_parallel.py [SECTION ...] [--model llama-3.1-8b] [--tp 2] [--batches 1,32] [--out
    DIRECTORY]

Sections: links, predict, decode, throughput, trace. Random weights of true shapes; the work of ``engine/gpu.py``.
Predictions (``transect.costs.serving``) are made of recorded coefficients and of the measured links, and written down
before the engine starts; 4 and 8 GPUs are predicted from two. Each section is kept as soon as it is
measured, in ``DIRECTORY/tp_MODEL.json``. No new section begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import PROMPT, RATES, Kept, engine, prompts
from benchmarks.engine.step_trace import traced_steps
from transect.bench.offline import decode_steps, run_all
from transect.bench.scaling import JOB, SIZES
from transect.bench.scaling import sum_times as links_of
from transect.bench.workload import throughput_protocol
from transect.costs.floors import batch_floor, step_floor
from transect.costs.links import MeasuredLinks
from transect.costs.model import Row
from transect.costs.serving import HOPPER, ServingSteps, batch_seconds
from transect.costs.steps import StepLoad
from transect.engine.executors.gpu.options import GPUOptions
from transect.engine.frontends.llm import LLM
from transect.parallel.launch import Ranks
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

SECTIONS = ("links", "predict", "decode", "throughput", "trace")
BATCHES = {"llama-3.1-8b": (1, 32, 64, 128, 256), "llama-3.3-70b": (1, 32, 128)}
BASE = "llama-3.1-8b"
PREDICTED = (2, 4, 8)


def predict(model: str, batches: list[int], steps: int, links: MeasuredLinks) -> dict[str, Any]:
    """Predict the seconds of decode steps, and tokens per second of the protocol, by the number of GPUs."""
    config, work = PRESETS[model], throughput_protocol()
    lengths = [(len(each.prompt), each.output_tokens) for each in work]
    out = sum(new for _, new in lengths)
    found: dict[str, Any] = {}
    for ranks in PREDICTED:
        layout = RankLayout(tensor=ranks)
        model_steps = ServingSteps(config, RATES, HOPPER["bf16"], None, layout, links.among(ranks))
        middle = PROMPT + steps // 2, 1
        decode = {batch: model_steps.seconds(StepLoad.of([middle] * batch)) for batch in batches}
        rate = out / batch_seconds(model_steps, lengths)
        found[str(ranks)] = {"decode_s": decode, "tokens_per_s": rate}
        shown = ", ".join(f"batch {batch} {seconds * 1e3:.2f} ms" for batch, seconds in decode.items())
        print(f"  predicted for {ranks} GPUs: {shown}; protocol {rate:,.0f} tok/s", flush=True)
    return found


def decode(llm: LLM, model: str, tp: int, batch: int, steps: int, runs: int, said: dict[str, Any]) -> dict[str, Any]:
    """Measure the seconds of a step, beside the floor of a rank and the prediction."""
    spare = -(-batch * PROMPT // 8192) + 2
    decode_steps(llm, prompts(min(batch, 16), 99), 8, spare)
    found = [decode_steps(llm, prompts(batch, seed), steps, spare) for seed in range(runs)]
    floor = step_floor(PRESETS[model], [Row(1, length) for length in found[0].middle], RATES, ranks=tp).seconds
    times = record.summary([each.per_token for each in found])
    median = statistics.median(found[0].steps)
    expected = said.get(str(tp), {}).get("decode_s", {}).get(batch)
    print(
        f"  decode {model} on {tp}, batch {batch}: {times['median'] * 1e3:.3f} ms (median step {median * 1e3:.3f}), "
        f"floor {floor * 1e3:.3f}, {floor / times['median']:.1%}{_beside(times['median'], expected)}",
        flush=True,
    )
    result = {"batch": batch, "step_s": times, "median_step_s": median, "floor_s": floor}
    return {**result, "of_floor": floor / times["median"], "predicted_s": expected}


def throughput(llm: LLM, model: str, tp: int, runs: int, said: dict[str, Any]) -> dict[str, Any]:
    """Run the protocol of ``engine_gpu.throughput``."""
    work = throughput_protocol()
    out = sum(each.output_tokens for each in work)
    run_all(llm, [type(each)(each.prompt, 20) for each in work[:16]])
    found = [run_all(llm, work) for _ in range(runs)]
    times = record.summary([seconds for seconds, _ in found])
    lengths = [(len(each.prompt), each.output_tokens) for each in work]
    layout = RankLayout(tensor=tp)
    floor = sum(part.seconds for part in batch_floor(PRESETS[model], lengths, RATES, layout=layout))
    rate = out / times["median"]
    expected = said.get(str(tp), {}).get("tokens_per_s")
    print(
        f"  throughput {model} on {tp}: {rate:,.0f} tok/s, floor {out / floor:,.0f}, {floor / times['median']:.1%}"
        f"{_beside(rate, expected)}",
        flush=True,
    )
    result = {"seconds": times, "tokens_per_s": rate, "floor_tokens_per_s": out / floor, "steps": found[0][1]}
    return {**result, "of_floor": floor / times["median"], "predicted_tokens_per_s": expected}


def _beside(measured: float, expected: float | None) -> str:
    return "" if expected is None else f", predicted {expected / measured - 1:+.1%} off"


def measure(options: argparse.Namespace) -> None:
    """Measure all sections of one model on one number of GPUs."""
    model, tp = options.model, options.tp
    kept = Kept(options.out / f"tp_{model}.json")
    batches = list(map(int, options.batches.split(","))) if options.batches else list(BATCHES[model])
    until = time.monotonic() + options.seconds
    said: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if tp > 1:
        ranks = Ranks.start(tp, "cuda")
        settings = {"ranks": ranks, "tensor_parallel_size": tp}
        if {"links", "predict"} & options.sections:
            ranks.call(JOB, SIZES)
            times = links_of(ranks.world, SIZES)
            for way, measured in (("NCCL", times.library), ("ours", times.own)):
                shown = (f"{size >> 10} KiB {seconds * 1e6:.1f} us" for size, seconds in measured.items())
                print(f"  a sum in a graph, {way}: {', '.join(shown)}", flush=True)
            print(f"  {times.said}", flush=True)
            kept.put(f"tp{tp} links", times._asdict())
            links = MeasuredLinks(times.library) if options.nccl else times.best()
            if tp == 2:
                said = (
                    kept.attempt(
                        f"predicted{'-nccl' * options.nccl}", lambda: predict(model, batches, options.steps, links)
                    )
                    or {}
                )
    if not {"decode", "throughput", "trace"} & options.sections:
        return
    began = time.monotonic()
    llm = engine(model, gpu=GPUOptions(peer_sums=not options.nccl), **settings)
    print(f"  engine on {tp}: started in {time.monotonic() - began:.1f} s", flush=True)

    def attempt(name: str, work: Callable[[], Any]) -> None:
        if time.monotonic() < until:
            kept.attempt(f"tp{tp}{'-nccl' * options.nccl} {name}", work)
        else:
            print(f"  no time is left for {name}", flush=True)

    if "decode" in options.sections:
        for batch in batches:
            attempt(
                f"decode {batch}",
                lambda batch=batch: decode(llm, model, tp, batch, options.steps, options.runs, said),
            )
    if "throughput" in options.sections:
        attempt("throughput", lambda: throughput(llm, model, tp, options.runs, said))
    if "trace" in options.sections:
        for batch in (min(batches), max(batches)):
            attempt(f"trace {batch}", lambda batch=batch: traced_steps(llm, prompts(batch, 1), False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--model", default=BASE, choices=sorted(BATCHES))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--nccl", action="store_true", help="sums by NCCL alone")
    parser.add_argument("--batches", help="such as 1,32; default: all that are kept")
    parser.add_argument("--steps", type=int, default=127)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    options.sections = set(options.sections or SECTIONS)
    print(f"{options.model} on {options.tp}", flush=True)
    measure(options)
    sys.stdout.flush()
    os._exit(0)  # ranks end with this process


if __name__ == "__main__":
    main()
