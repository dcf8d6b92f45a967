"""Predictions of the explaining tools, compared with an engine: step times, a changed setting, the cost of the log.

    python benchmarks/explain/step_prediction.py [--rate 1] [--seconds 120] [--out ...]
    python benchmarks/explain/step_prediction.py --model llama-3.1-8b --load-format dummy --rate 20 --seconds 60
    --rows 64

Requests arrive by chance, their lengths are drawn as well, so that prompts and decodes mix. One run is logged: the
model of step times is fitted on its first half and predicts the second, the log is replayed with nothing changed, and
a smaller ``max_num_batched_tokens`` is predicted from it. Then the same requests run with that setting, and the
latencies of the prediction stand beside those measured. Last, batches decode with and without the log, in turns, in
one engine. ``--logs FOLDER`` keeps the decision logs, and every step's work with its time, predicted and measured.
``--steps-only`` stops after the step times of the first run.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import gzip
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams
from transect.costs.fitting import FittedSteps
from transect.engine.executors.gpu.runner import GPURunner
from transect.explain.engine.calibration import measured_steps
from transect.explain.engine.log import DecisionRunLog, load
from transect.explain.engine.rates import rates_for
from transect.explain.engine.replay import replay
from transect.explain.engine.simulate import recorded
from transect.explain.engine.what_if import what_if
from transect.explain.engine.work import StepWork

BEFORE, AFTER = 2048, 512
"""``max_num_batched_tokens`` of the logged run, and of the predicted one."""
Arrival = tuple[float, list[int], SamplingParams]


def arrivals(rate: float, seconds: float, context: int, seed: int) -> list[Arrival]:
    """Generate requests of a Poisson process: time, prompt and length. Prompts are long enough to be cut by a small
    budget."""
    chance = random.Random(seed)
    found, at = [], 0.0
    while True:
        at += chance.expovariate(rate)
        if at > seconds:
            return found
        length = chance.randint(context // 16, context // 2)
        prompt = [chance.randrange(10, 10000) for _ in range(length)]
        found.append((at, prompt, SamplingParams(max_tokens=chance.randint(8, context // 8), ignore_eos=True, seed=1)))


def serve(llm: LLM, work: list[Arrival]) -> None:
    """Run the requests as they arrive. One that comes within a step has come then, though the engine sees it later."""
    clock, waiting = llm._core.scheduler.clock, list(reversed(work))
    began = clock.now()
    while waiting or llm.has_work:
        now = clock.now() - began
        while waiting and waiting[-1][0] <= now:
            at, prompt, params = waiting.pop()
            request = llm._request(prompt, params)
            llm._core.add(msgspec.structs.replace(request, arrival_time=began + at))
        if llm.has_work:
            llm.step()
        elif waiting:
            time.sleep(min(0.0005, max(0.0, waiting[-1][0] - now)))


def logged(options: argparse.Namespace, work: list[Arrival], budget: int, path: Path) -> None:
    """Make a run with a log in ``path``."""
    llm = engine(options, max_num_batched_tokens=budget, decision_log=str(path))
    serve(llm, work)
    llm.close()
    del llm
    release()


def engine(options: argparse.Namespace, **settings: Any) -> LLM:
    """Build an engine without a prefix cache: random prompts share nothing. Requests arrive one by one, as at a server,
    so every graph exists before the first of them; but the sizes of steps follow from the settings alone, not from
    learned times."""
    llm = LLM(
        options.model,
        load_format=options.load_format,
        max_model_len=options.context,
        max_num_seqs=options.rows,
        kv_cache_tokens=options.rows * options.context,
        enable_prefix_caching=False,
        longest_first=False,
        mixed_step_limit="full",
        **settings,
    )
    executor = llm._core.executor
    if isinstance(executor, GPURunner):
        executor.warm([], mixed=True)
    return llm


def release() -> None:
    """Give the memory of an engine that is gone back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare predictions from one log with a second run's measurements."""
    work = arrivals(options.rate, options.seconds, options.context, 0)
    first, second = folder / "before.log", folder / "after.log"
    logged(options, work, BEFORE, first)
    log = load(first)
    again = replay(log)
    print(again, flush=True)
    floors = StepWork.of(log.header, rates_for(log.header))
    residuals(log, floors, folder / "steps.csv.gz")
    found = what_if(log, floors, [f"max_num_batched_tokens={AFTER}"])
    assert found.errors is not None, "the run is too short to check step times"
    print(found.errors, *found.warnings, sep="\n", flush=True)
    print(f"following the machine: {found.followed}\nlike steps: {found.like}", flush=True)
    kept = {
        "requests": len(work),
        "steps": len(log.steps),
        "replay": dataclasses.asdict(again),
        "step_time_errors": dataclasses.asdict(found.errors),
        "followed_errors": None if found.followed is None else dataclasses.asdict(found.followed),
        "like_steps": None if found.like is None else dataclasses.asdict(found.like),
        "warnings": found.warnings,
    }
    if options.steps_only:
        return kept
    logged(options, work, AFTER, second)
    measured = recorded(load(second))
    latencies = {}
    for kind in ("ttft", "itl"):
        for share in ("p50", "p99"):
            runs = (found.measured, found.same, found.predicted, measured)
            before, same, predicted, after = (getattr(run, kind)[share] for run in runs)
            latencies[f"{kind} {share}"] = {
                "before_s": before,
                "simulated_unchanged_s": same,
                "predicted_s": predicted,
                "measured_s": after,
                "error": predicted / after - 1,
            }
            print(
                f"{kind} {share}: {before:.4f} s (simulated {same:.4f}); "
                f"changed: predicted {predicted:.4f}, measured {after:.4f}",
                flush=True,
            )
    return kept | {
        "changed": {"max_num_batched_tokens": [BEFORE, AFTER]},
        "latencies": latencies,
    }


def residuals(log: DecisionRunLog, work: StepWork, path: Path) -> None:
    """Write every step with its work and its times; the model is that of the first half."""
    loads, seconds = measured_steps(log, work)
    model = FittedSteps.fit(loads[: len(loads) // 2], seconds[: len(loads) // 2])
    with gzip.open(path, "wt", newline="") as file:
        names = loads[0]._fields
        rows = csv.writer(file)
        rows.writerow([*names, "predicted", "measured"])
        predicted = model.predict(loads).tolist()
        for load_, guess, taken in zip(loads, predicted, seconds, strict=True):
            rows.writerow([*(getattr(load_, name) for name in names), guess, taken])


def ablation(options: argparse.Namespace, rounds: int) -> dict[str, Any]:
    """Measure the seconds of a batch that decodes, alternately with the log (in memory, as by default) and without: one
    engine, so that only the log differs."""
    params = SamplingParams(max_tokens=options.context // 8, ignore_eos=True, seed=1)
    prompts = [[10 + row] * 16 for row in range(options.rows)]
    taken: dict[bool, list[float]] = {True: [], False: []}
    llm = engine(options)
    core = llm._core
    log = core.decisions
    assert log is not None
    for turn in range(2 * rounds + 2):
        kept = turn % 2 == 0
        core.decisions, core.scheduler.ended = (log, []) if kept else (None, None)
        for prompt in prompts:
            llm.submit(prompt, params)
        began = time.perf_counter()
        while llm.has_work:
            llm.step()
        if turn > 1:
            taken[kept].append(time.perf_counter() - began)
    del llm, core
    release()
    with_log, none = (record.summary(taken[kept]) for kept in (True, False))
    extra = with_log["median"] / none["median"] - 1
    print(f"the log costs {extra:+.2%}", flush=True)
    return {"with_log_s": with_log, "without_s": none, "extra": extra}


def _spread(result: dict[str, Any]) -> str:
    """Format the variation of the machine itself."""
    followed, like = result.get("followed_errors"), result.get("like_steps")
    if followed is None or like is None:
        return ""
    return (
        f" With predictions that follow the speed of the last five steps: median "
        f"{followed['median']:.1%}, p99 {followed['p99']:.1%}. Decode steps of the same sequences differ from the mean "
        f"of the steps before and after by {like['median']:.1%} at the median and {like['p99']:.1%} at p99: this is "
        "noise of the machine that no model can predict."
    )


def table(result: dict[str, Any]) -> str:
    """Format predictions beside measurements."""
    steps, machine = result["step_time_errors"], result["environment"]
    cost = f" The log costs {result['log']['extra']:+.2%} of a batch's time." if "log" in result else ""
    lines = [
        f"{result['replay']['decisions']:,} decisions replayed, "
        + ("all the same" if result["replay"]["difference"] is None else "not the same")
        + f". Step times, first half of the log on the second ({steps['steps']:,} steps): median error "
        f"{steps['median']:.1%}, p99 {steps['p99']:.1%}.{cost}" + _spread(result),
        "",
    ]
    if "latencies" in result:
        lines += [*_changed(result), ""]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    lines.append(f"{result['model']}, {result['requests']} requests, {where}, {record.made_at([machine])}.")
    return "\n".join(lines) + "\n"


def _changed(result: dict[str, Any]) -> list[str]:
    """Format latencies with a smaller budget, predicted and measured."""
    lines = [
        f"| ms | {BEFORE} tokens a step | predicted for {AFTER} | measured with {AFTER} | error |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["latencies"].items():
        shown = (f"{1e3 * row[key]:.1f}" for key in ("before_s", "predicted_s", "measured_s"))
        lines.append(
            f"| {name.replace('ttft', 'TTFT').replace('itl', 'ITL')} | {' | '.join(shown)} | {row['error']:+.0%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals; the first half calibrates")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9, help="of the log's cost")
    parser.add_argument("--steps-only", action="store_true", help="no second run, and not the log's cost")
    parser.add_argument("--logs", type=Path, help="keep the decision logs and every step's times in this folder")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "step_prediction.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options, Path(folder))
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            for file in Path(folder).iterdir():
                shutil.copyfile(file, options.logs / file.name)
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    result = {
        "command": f"python benchmarks/explain/step_prediction.py --model {options.model} --rate {options.rate:g} "
        f"--seconds {options.seconds:g}",
        "environment": record.environment() | gpu,
        "model": options.model,
        **found,
    }
    record.write(options.out, result)  # should what follows fail
    if options.steps_only:
        return
    record.write(options.out, {**result, "log": ablation(options, options.rounds)})


if __name__ == "__main__":
    main()
