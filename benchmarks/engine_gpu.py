"""The engine on one GPU: decode, prefill, throughput, start-up, and what each trick is worth, beside the floor.

    python benchmarks/engine_gpu.py [SECTION ...] [--models llama-3.1-8b,qwen3-0.6b] [--out DIRECTORY] [--runs 3]

Sections: decode, prefill, throughput, ablation, host, startup. Random weights of true shapes. Decode: prompts of 512
tokens, 256 steps, so 640 tokens of context on average; the time of a step is wall time as seen by the caller of
``LLM.step``. Floors as in ``transect.bench.floors``, with the rates below.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import record
from transect.bench.floors import Rates, batch_floor, step_floor
from transect.bench.offline import decode_steps, prefill_seconds, run_all
from transect.bench.workload import throughput_protocol
from transect.engine.llm import LLM
from transect.engine.sampling_params import SamplingParams
from transect.models.cost import Row
from transect.models.presets import PRESETS

RATES = Rates(4.35e12, 750e12, "H200, measured")
PROMPT, STEPS = 512, 255
BATCHES = {"llama-3.1-8b": (1, 8, 32, 64, 128, 256), "qwen3-0.6b": (1, 64)}
DEFAULT_MODELS = "llama-3.1-8b,qwen3-0.6b"


def engine(model: str, **settings: Any) -> LLM:
    """On random weights; no prefix cache, so that nothing is saved by chance."""
    return LLM(model, load_format="dummy", enable_prefix_caching=False, max_model_len=2048, seed=0, **settings)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Of PROMPT random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10000, (count, PROMPT), generator=generator).tolist()


def release() -> None:
    """Give the memory of an engine that is gone back."""
    gc.collect()
    torch.cuda.empty_cache()


def decode(llm: LLM, model: str, batch: int, runs: int) -> dict[str, Any]:
    """Seconds of a step, and of an output token of one sequence."""
    spare = -(-batch * PROMPT // 8192) + 2
    found = [decode_steps(llm, prompts(batch, seed), STEPS, spare) for seed in range(runs + 1)][1:]
    floor = step_floor(PRESETS[model], [Row(1, length) for length in found[0].middle], RATES)
    times = record.summary([each.per_token for each in found])
    share = floor.seconds / times["median"]
    print(
        f"  decode {model} batch {batch}: {times['median'] * 1e3:.3f} ms, floor {floor.seconds * 1e3:.3f}, {share:.1%}"
    )
    return {"batch": batch, "step_s": times, "floor_s": floor.seconds, "of_floor": share}


def prefill(llm: LLM, model: str, runs: int) -> dict[str, Any]:
    """256 prompts of 512 tokens, one token drawn for each."""
    times = record.summary([prefill_seconds(llm, prompts(256, seed)) for seed in range(runs + 1)][1:])
    floor = step_floor(PRESETS[model], [Row(PROMPT, PROMPT)] * 256, RATES).seconds
    print(
        f"  prefill {model} 256 x {PROMPT}: {times['median']:.3f} s, floor {floor:.3f}, {floor / times['median']:.1%}"
    )
    return {"seconds": times, "floor_s": floor, "of_floor": floor / times["median"]}


def throughput(llm: LLM, model: str, runs: int) -> dict[str, Any]:
    """The protocol of nano-vllm and mini-sglang."""
    work = throughput_protocol()
    out = sum(each.output_tokens for each in work)
    times, steps = [], 0
    for _ in range(runs):
        seconds, steps = run_all(llm, work)
        times.append(seconds)
    found = record.summary(times)
    lengths = [(len(each.prompt), each.output_tokens) for each in work]
    floor = sum(part.seconds for part in batch_floor(PRESETS[model], lengths, RATES))
    rate = out / found["median"]
    print(
        f"  throughput {model}: {rate:.0f} tok/s, floor {out / floor:.0f}, {floor / found['median']:.1%}, {steps} steps"
    )
    return {
        "seconds": found,
        "output_tokens": out,
        "tokens_per_s": rate,
        "floor_tokens_per_s": out / floor,
        "of_floor": floor / found["median"],
        "steps": steps,
    }


class _TimedExecutor:
    """Notes how long the host is busy in ``submit``, and how long it waits for results."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.submits, self.waits = inner, 0.0, 0.0

    def submit(self, batch: Any) -> Any:
        start = time.perf_counter()
        handle = self.inner.submit(batch)
        self.submits += time.perf_counter() - start
        return _TimedHandle(self, handle)


class _TimedHandle:
    def __init__(self, owner: _TimedExecutor, handle: Any) -> None:
        self.owner, self.handle = owner, handle

    def result(self) -> Any:
        start = time.perf_counter()
        ready = getattr(self.handle, "ready", None)
        if ready is not None:
            ready.synchronize()
        self.owner.waits += time.perf_counter() - start
        return self.handle.result()


def host(llm: LLM, batch: int, mixed: bool) -> dict[str, Any]:
    """Host time of a decode step by part, and how much of the time the GPU does nothing (from the profiler's trace)."""
    timed = _TimedExecutor(llm._core.executor)
    llm._core.executor = timed
    settings: list[dict[str, Any]] = [{}]
    if mixed:
        settings = [
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.0, "seed": 3, "top_k": 50},
            {"temperature": 0.0, "logprobs": 5},
            {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
        ]
    for index, prompt in enumerate(prompts(batch, 1)):
        params = {"temperature": 0.6, **settings[index % len(settings)]}
        llm.submit(prompt, SamplingParams(max_tokens=400, ignore_eos=True, **params))
    for _ in range(40):
        llm.step()
    torch.cuda.synchronize()
    steps = 100
    timed.submits = timed.waits = 0.0
    start = time.perf_counter()
    for _ in range(steps):
        llm.step()
    wall = (time.perf_counter() - start) / steps
    submit, wait = timed.submits / steps, timed.waits / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(20):
            llm.step()
        torch.cuda.synchronize()
    busy, span, launches, kernels = _busy(trace, 20)
    while llm.has_work:
        llm.step()
    llm._core.executor = timed.inner
    result = {
        "batch": batch,
        "mixed_options": mixed,
        "step_s": wall,
        "host_s": wall - wait,
        "submit_s": submit,
        "wait_s": wait,
        "idle_share": 1 - busy / span,
        "host_calls_in_20_steps": launches,
        "microseconds_a_step": kernels,
    }
    kind = " mixed" if mixed else ""
    print(
        f"  host, batch {batch}{kind}: step {wall * 1e3:.3f} ms, host {1e3 * (wall - wait):.3f} ms "
        f"(submit {submit * 1e3:.3f}), GPU idle {1 - busy / span:.1%}; calls {launches}"
    )
    for name, microseconds in list(kernels.items())[:24]:
        print(f"      {microseconds:9.1f} us  {name}")
    return result


def _busy(trace: Any, steps: int) -> tuple[float, float, dict[str, int], dict[str, float]]:
    """(microseconds in which a kernel or copy ran, from the first to the last, CUDA calls of the host, microseconds of
    a step by kernel)."""
    spans: list[tuple[int, int]] = []
    calls: dict[str, int] = {}
    kernels: dict[str, float] = {}
    for event in trace.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            name = event.name()[:80]
            kernels[name] = kernels.get(name, 0.0) + event.duration_ns() / 1e3 / steps
        elif event.name().startswith("cu"):
            calls[event.name()] = calls.get(event.name(), 0) + 1
    spans.sort()
    busy, end = 0, spans[0][0]
    for begin, finish in spans:
        if finish > end:
            busy += finish - max(begin, end)
            end = finish
    ordered = dict(sorted(kernels.items(), key=lambda pair: -pair[1]))
    return busy / 1e3, (end - spans[0][0]) / 1e3, calls, ordered


ABLATIONS: dict[str, dict[str, Any]] = {
    "everything on": {},
    "CUDA graphs off": {"cuda_graphs": "off"},
    "async scheduling off": {"async_scheduling": False},
    "fused operators off": {"fused_operators": False},
    "dependent launch off": {"dependent_launch": False},
    "device sampling off": {"device_sampling": False},
    "deterministic": {"deterministic": True},
}


def ablation(model: str, runs: int) -> dict[str, Any]:
    """Decode at a small and a large batch, and the throughput protocol, with each thing off in turn."""
    found = {}
    for name, settings in ABLATIONS.items():
        print(f" {name}")
        try:
            llm = engine(model, **settings)
            found[name] = {
                "decode": [decode(llm, model, batch, runs) for batch in (1, 64)],
                "throughput": throughput(llm, model, 1),
            }
            del llm
        except Exception:
            traceback.print_exc()
        release()
    return found


STARTUP = """
import sys, time
start = time.time()
from transect.engine.llm import LLM
from transect.engine.sampling_params import SamplingParams
imported = time.time()
llm = LLM(sys.argv[1], load_format="dummy", max_model_len=8192)
built = time.time()
llm.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
while not llm.step(): pass
print("STARTUP", imported - start, built - imported, time.time() - built)
"""


def startup(model: str, times: int = 2) -> list[dict[str, float]]:
    """Process start to first token; the first run compiles the kernels that are not in Triton's cache."""
    found = []
    for _ in range(times):
        start = time.time()
        command = [sys.executable, "-c", STARTUP, model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        total = time.time() - start
        print("   ", "\n    ".join(line for line in done.stderr.splitlines() if "transect:" in line))
        line = next((line for line in done.stdout.splitlines() if line.startswith("STARTUP")), None)
        if line is None:
            print(done.stderr[-3000:])
            continue
        imported, built, first = map(float, line.split()[1:])
        found.append({"total_s": total, "import_s": imported, "build_s": built, "first_token_s": first})
        print(f"  startup {model}: {total:.1f} s (import {imported:.1f}, build {built:.1f}, first token {first:.2f})")
    return found


def table(files: dict[str, dict[str, Any]]) -> str:
    """Figures of each model as Markdown, a column for each run."""
    commits = list(dict.fromkeys(run["commit"] for known in files.values() for run in known["runs"]))
    lines = [f"| model | work | floor | {' | '.join(commits)} |", "|---|---|---|" + "---|" * len(commits)]
    for model, known in files.items():
        cells: dict[str, dict[str, str]] = {}
        floors: dict[str, str] = {}
        for run in known["runs"]:
            for name, row in run["results"].items():
                shown = _cell(name, row)
                if shown is not None:
                    work, floors[shown[0]], cell = shown[0], shown[1], shown[2]
                    cells.setdefault(work, {})[run["commit"]] = cell
        for work, row in cells.items():
            lines.append(f"| {model} | {work} | {floors[work]} | {' | '.join(row.get(c, '') for c in commits)} |")
    return "\n".join(lines) + "\n"


def newest(files: dict[str, dict[str, Any]]) -> str:
    """One column as Markdown: of each figure the last that was measured, with the commits below."""
    lines = ["| model | work | the least | measured (of the least) |", "|---|---|---|---|"]
    commits: dict[str, None] = {}
    for model, known in files.items():
        rows: dict[str, str] = {}
        for run in known["runs"]:
            shown = [cell for name, row in run["results"].items() if (cell := _cell(name, row)) is not None]
            rows |= {work: f"| {model} | {work} | {floor} | {cell} |" for work, floor, cell in shown}
            commits |= dict.fromkeys([run["commit"]] if shown else [])
        lines.extend(rows.values())
    environment = next(iter(files.values()))["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    origin = f"`python benchmarks/engine_gpu.py` on one {environment['gpu']}, {packages}, commit {list(commits)[-1]}."
    return "\n".join(lines) + f"\n\n{origin}\n"


def _cell(name: str, row: Any) -> tuple[str, str, str] | None:
    """(work, floor, measured and its share of the floor) of one result; None for what is shown elsewhere."""
    if name.startswith("decode"):
        measured, floor = row["step_s"]["median"] * 1e3, row["floor_s"] * 1e3
        return f"decode, batch {row['batch']}", f"{floor:.2f} ms", f"{measured:.2f} ms ({row['of_floor']:.0%})"
    if name == "prefill":
        measured = row["seconds"]["median"]
        return f"prefill, 256 x {PROMPT}", f"{row['floor_s']:.2f} s", f"{measured:.2f} s ({row['of_floor']:.0%})"
    if name == "throughput":
        floor, rate = row["floor_tokens_per_s"], row["tokens_per_s"]
        return "throughput", f"{floor:,.0f} tok/s", f"{rate:,.0f} tok/s ({row['of_floor']:.0%})"
    if name == "startup" and row:
        return "start to first token, then again", "", " s, ".join(f"{each['total_s']:.1f}" for each in row) + " s"
    return None


def host_table(files: dict[str, dict[str, Any]]) -> str:
    """Host time of a step, and the share of time in which the GPU does nothing, as Markdown."""
    lines = ["| model | batch | sampling options | step | host | GPU idle |", "|---|---|---|---|---|---|"]
    for model, known in files.items():
        for run in known["runs"]:
            for row in (value for name, value in run["results"].items() if name.startswith("host")):
                lines.append(
                    f"| {model} | {row['batch']} | {'all mixed' if row['mixed_options'] else 'temperature'} | "
                    f"{row['step_s'] * 1e3:.2f} ms | {row['host_s'] * 1e3:.2f} ms | {row['idle_share']:.1%} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["decode", "prefill", "throughput"])
    parser.add_argument("--models", default=DEFAULT_MODELS)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    environment = {**record.environment(("torch", "triton")), "rates": RATES.device}
    for model in options.models.split(","):
        results: dict[str, Any] = {}

        def attempt(name: str, work: Callable[[], Any], results: dict[str, Any] = results) -> None:
            try:
                results[name] = work()
            except Exception:
                traceback.print_exc()

        print(model)
        if "startup" in options.sections:
            attempt("startup", lambda model=model: startup(model))
        if "ablation" in options.sections:
            attempt("ablation", lambda model=model: ablation(model, 1))
        if {"decode", "prefill", "throughput", "host"} & set(options.sections):
            llm = engine(model)
            if "decode" in options.sections:
                for batch in BATCHES.get(model, (1, 64, 256)):
                    attempt(f"decode {batch}", lambda llm=llm, m=model, b=batch: decode(llm, m, b, options.runs))
            if "prefill" in options.sections:
                attempt("prefill", lambda llm=llm, m=model: prefill(llm, m, options.runs))
            if "host" in options.sections:
                for batch, mixed in ((1, False), (64, False), (256, False), (256, True)):
                    attempt(f"host {batch} {mixed}", lambda llm=llm, b=batch, x=mixed: host(llm, b, x))
            if "throughput" in options.sections:
                attempt("throughput", lambda llm=llm, m=model: throughput(llm, m, options.runs))
            del llm
            release()
        path = options.out / f"engine_{model}.json"
        known = json.loads(path.read_text()) if path.exists() else {"runs": []}
        commit = environment.pop("commit", None) or record.commit()
        run = next((run for run in known["runs"] if run["commit"] == commit), None)
        if run is None:
            run = {"commit": commit, "note": "", "results": {}}
            known["runs"].append(run)
        run["results"].update(results)
        known["environment"] = environment | {"gpu": torch.cuda.get_device_name()}
        path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
