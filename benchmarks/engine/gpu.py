"""The engine on one GPU: decode, prefill, throughput, start-up, and what each trick is worth, beside the floor.

    python benchmarks/engine/gpu.py [SECTION ...] [--models llama-3.1-8b,qwen3-0.6b,qwen3-8b] [--out DIRECTORY]
    python benchmarks/engine/gpu.py --merge DIRECTORY      sections measured elsewhere take the place of those kept here

Sections: startup, decode, prefill, trace, throughput, deterministic, ablation. Random weights of true shapes. Decode:
prompts of 512 tokens, 256 steps, so 640 tokens of context on average; the time of a step is wall time as seen by the
caller of ``LLM.step``. Floors as in ``transect.costs.floors``, with the rates below. A section is kept as soon as it is
measured, with its commit, and one that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.ablation import ablation
from benchmarks.engine.step_kinds import StepClock, compared, traced_at
from benchmarks.engine.step_trace import TIMED, WARM, traced_steps
from transect.bench.energy import EnergyMeter, Nvml
from transect.bench.offline import decode_steps, prefill_seconds, run_all
from transect.bench.workload import throughput_protocol
from transect.costs.floors import Rates, batch_floor, step_floor
from transect.costs.model import Row
from transect.engine.frontends.llm import LLM
from transect.spec.shapes import PRESETS

RATES = Rates(4.35e12, 750e12, "H200, measured")
PROMPT, STEPS = 512, 255
BATCHES = {"llama-3.1-8b": (1, 8, 32, 64, 128, 256), "qwen3-0.6b": (1, 64), "qwen3-8b": (1, 64, 256)}
TRACES = ((1, False), (64, False), (256, False), (256, True))
TRACED_AT = (3, 100, 400, 600, 850)
"""First of the steps of the protocol whose kernels are listed."""
SECTIONS = ("startup", "decode", "prefill", "trace", "throughput", "deterministic", "ablation")
ONLY = {"qwen3-8b": ("throughput",)}
"""Sections that a model takes part in unless they are asked for by name."""
DEFAULT_MODELS = "llama-3.1-8b,qwen3-0.6b,qwen3-8b"


def engine(model: str, **settings: Any) -> LLM:
    """Build an engine on random weights; without a prefix cache, so that no prompt is cached by chance."""
    return LLM(model, load_format="dummy", enable_prefix_caching=False, max_model_len=2048, seed=0, **settings)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Generate PROMPT random tokens each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10000, (count, PROMPT), generator=generator).tolist()


def large(model: str) -> bool:
    """Check if a run of hundreds of prompts takes seconds: it is then warmed up with fewer."""
    return PRESETS[model].dim >= 2048


def release() -> None:
    """Give the memory of an engine that is gone back."""
    gc.collect()
    torch.cuda.empty_cache()


def decode(llm: LLM, model: str, batch: int, runs: int) -> dict[str, Any]:
    """Measure the seconds of a step, and of an output token of one sequence."""
    spare = -(-batch * PROMPT // 8192) + 2
    found = [decode_steps(llm, prompts(batch, seed), STEPS, spare) for seed in range(runs)]
    floor = step_floor(PRESETS[model], [Row(1, length) for length in found[0].middle], RATES)
    times = record.summary([each.per_token for each in found])
    share = floor.seconds / times["median"]
    print(
        f"  decode {model} batch {batch}: {times['median'] * 1e3:.3f} ms, floor {floor.seconds * 1e3:.3f}, {share:.1%}"
    )
    return {"batch": batch, "step_s": times, "floor_s": floor.seconds, "of_floor": share}


def prefill(llm: LLM, model: str, runs: int) -> dict[str, Any]:
    """Measure 256 prompts of 512 tokens, one token drawn for each."""
    prefill_seconds(llm, prompts(48 if large(model) else 256, runs))
    times = record.summary([prefill_seconds(llm, prompts(256, seed)) for seed in range(runs)])
    floor = step_floor(PRESETS[model], [Row(PROMPT, PROMPT)] * 256, RATES).seconds
    print(
        f"  prefill {model} 256 x {PROMPT}: {times['median']:.3f} s, floor {floor:.3f}, {floor / times['median']:.1%}"
    )
    return {"seconds": times, "floor_s": floor, "of_floor": floor / times["median"]}


def throughput(llm: LLM, model: str, runs: int) -> dict[str, Any]:
    """Run the protocol of nano-vllm and mini-sglang, with the energy that it takes if NVML reports it."""
    work = throughput_protocol()
    out = sum(each.output_tokens for each in work)
    into = sum(len(each.prompt) for each in work)
    try:
        meter = EnergyMeter(Nvml())
    except ValueError as error:
        print(f"  {error}")
        meter = None
    times, energies, steps = [], [], 0
    # The same steps with prompts, whose graphs are captured when they first come.
    run_all(llm, [replace(each, output_tokens=20) for each in (work[:16] if large(model) else work)])
    for _ in range(runs):
        with meter or nullcontext():
            seconds, steps = run_all(llm, work)
        times.append(seconds)
        if meter is not None and meter.result is not None:
            energies.append(meter.result.per_token(into, out))
    found = record.summary(times)
    lengths = [(len(each.prompt), each.output_tokens) for each in work]
    floor = sum(part.seconds for part in batch_floor(PRESETS[model], lengths, RATES))
    rate = out / found["median"]
    scheduler = llm._core.scheduler
    filled, scheduler.budget.fill_tokens = scheduler.budget.fill_tokens, None
    unfilled = None if filled is None else out / run_all(llm, work)[0]
    scheduler.budget.fill_tokens = filled
    energy = energies[len(energies) // 2] if energies else None
    joules = "" if energy is None else f", {energy['joules_per_output_token']:.3f} J a token, {energy['watts']:.0f} W"
    print(
        f"  throughput {model}: {rate:.0f} tok/s, floor {out / floor:.0f}, {floor / found['median']:.1%}, {steps} "
        f"steps{joules}" + ("" if unfilled is None else f"; steps not filled up {unfilled:.0f}")
    )
    return {
        "seconds": found,
        "output_tokens": out,
        "tokens_per_s": rate,
        "unfilled_tokens_per_s": unfilled,
        "floor_tokens_per_s": out / floor,
        "of_floor": floor / found["median"],
        "steps": steps,
        "energy": energy,
    }


def trace(llm: LLM, model: str, batch: int, mixed: bool) -> dict[str, Any]:
    """Trace the time of a decode step, beside the floor of a step half-way."""
    middle = PROMPT + WARM + TIMED // 2
    floor = step_floor(PRESETS[model], [Row(1, middle)] * batch, RATES).seconds
    return {**traced_steps(llm, prompts(batch, 1), mixed), "floor_s": floor}


def deterministic(model: str, fast: dict[str, Any] | None) -> dict[str, Any]:
    """Run the throughput protocol in batch-invariant mode, beside the usual one of the same run, and again with the
    time of each kind of step. The kernels of some steps are printed."""
    rates = {} if fast is None else {"fast": fast}
    kinds = {}
    for name in ("fast", "deterministic"):
        llm = engine(model, deterministic=name == "deterministic")
        if name not in rates:
            rates[name] = throughput(llm, model, 1)
        with StepClock(llm) as clock:
            run_all(llm, throughput_protocol())
        kinds[name] = clock.kinds()
        traced_at(llm, throughput_protocol(), TRACED_AT)
        del llm
        release()
    cost = 1 - rates["deterministic"]["tokens_per_s"] / rates["fast"]["tokens_per_s"]
    print(f"  deterministic {model}: costs {cost:.1%} of the throughput")
    return {**rates, "cost": cost, "kinds": compared(kinds["fast"], kinds["deterministic"])}


STARTUP = """
import sys, time
start = time.time()
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams
imported = time.time()
llm = LLM(sys.argv[1], load_format="dummy", max_model_len=8192)
built = time.time()
llm.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
while not llm.step(): pass
print("STARTUP", imported - start, built - imported, time.time() - built)
"""


def build_parts(printed: str) -> dict[str, float]:
    """Parse the seconds by part from an engine's start-up line."""
    line = next(line for line in printed.splitlines() if "start-up: " in line).split("start-up: ")[1]
    return {name.strip(): float(seconds) for name, seconds in re.findall(r"([^,]+?) ([\d.]+) s(?:,|$)", line)}


def since_start() -> float:
    """Return the seconds since this process began (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def first_start(model: str) -> tuple[LLM, list[dict[str, Any]]]:
    """Build an engine, and measure the time from the beginning of this process to its first token."""
    imported = since_start()
    printed = io.StringIO()
    with redirect_stderr(printed):
        llm = engine(model)
    built = since_start()
    prefill_seconds(llm, [[1, 2, 3, 4, 5]])
    total = since_start()
    parts = {"import": imported, **build_parts(printed.getvalue()), "first token": total - built}
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    print(f"  start of {model}, caches empty: {total:.1f} s ({shown})", flush=True)
    return llm, [{"caches": "empty", "total_s": total, "parts_s": parts}]


def startup(model: str) -> list[dict[str, Any]]:
    """Process start to first token, twice: with empty caches, so that every kernel is compiled, and again."""
    found = []
    with tempfile.TemporaryDirectory() as empty:
        places = {"TRITON_CACHE_DIR": f"{empty}/triton", "TRANSECT_CACHE": f"{empty}/transect"}
        for caches in ("empty", "filled"):
            start = time.time()
            command = [sys.executable, "-c", STARTUP, model]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | places)
            total = time.time() - start
            line = next((line for line in done.stdout.splitlines() if line.startswith("STARTUP")), None)
            if line is None:
                raise RuntimeError(done.stderr[-3000:])
            imported, built, first = map(float, line.split()[1:])
            found.append(
                {
                    "caches": caches,
                    "total_s": total,
                    "parts_s": {
                        "interpreter and exit": total - imported - built - first,
                        "import": imported,
                        **build_parts(done.stderr),
                        "first token": first,
                    },
                }
            )
            shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found[-1]["parts_s"].items())
            print(f"  startup {model}, caches {caches}: {total:.1f} s ({shown})", flush=True)
    return found


class Kept:
    """The results of one model in a file, section by section."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {**record.environment(("torch", "triton")), "rates": RATES.device}
        self.commit = self.environment.pop("commit")
        if torch.cuda.is_available():
            self.environment["gpu"] = torch.cuda.get_device_name()

    def put(self, section: str, result: Any) -> None:
        """Replace an earlier result of this section."""
        kept = json.loads(self.path.read_text()) if self.path.exists() else {"environment": {}, "sections": {}}
        kept["environment"] = self.environment
        kept["sections"][section] = {"commit": self.commit, "version": self.environment["version"], "result": result}
        record.write(self.path, kept)

    def attempt(self, section: str, work: Callable[[], Any]) -> Any:
        """Measure, keep, and return; a failure is printed, None returned, and the next section begins."""
        result = None
        try:
            result = work()
            self.put(section, result)
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        return result


def measure(model: str, sections: set[str], kept: Kept, runs: int, fresh: bool) -> None:
    """Measure the sections of one model."""
    if "startup" in sections:
        kept.attempt("startup", lambda: startup(model))
    fast = None
    if {"decode", "prefill", "trace", "throughput"} & sections:
        if fresh:
            llm, began = first_start(model)
            kept.put("startup", began)
        else:
            llm = engine(model)
        decode_steps(llm, prompts(16, 99), 8, 4)  # warm
        if "decode" in sections:
            for batch in BATCHES[model]:
                kept.attempt(f"decode {batch}", lambda batch=batch: decode(llm, model, batch, runs))
        if "prefill" in sections:
            kept.attempt("prefill", lambda: prefill(llm, model, runs))
        if "throughput" in sections:
            fast = kept.attempt("throughput", lambda: throughput(llm, model, runs))
        if "trace" in sections:
            for batch, mixed in TRACES:
                name = f"trace {batch}{' mixed' if mixed else ''}"
                kept.attempt(name, lambda b=batch, m=mixed: trace(llm, model, b, m))
        del llm
        release()
    if "deterministic" in sections:
        kept.attempt("deterministic", lambda: deterministic(model, fast))
    if "ablation" in sections:
        build = lambda **settings: engine(model, **{"cuda_graphs": "lazy", **settings})  # noqa: E731
        ablation(
            build, prompts(256, 1), release, lambda found: kept.put("ablation", found), 48 if large(model) else 256
        )


def merge(directory: Path, out: Path) -> None:
    """Merge the sections of every ``engine_*.json`` in ``directory`` into the files of the same names in ``out``."""
    for path in sorted(directory.glob("engine_*.json")):
        new, target = json.loads(path.read_text()), out / path.name
        known = json.loads(target.read_text()) if target.exists() else {"sections": {}}
        record.write(target, {**new, "sections": {**known.get("sections", {}), **new["sections"]}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--models", default=DEFAULT_MODELS)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="caches are empty: keep how long the first start takes")
    parser.add_argument("--merge", type=Path)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    if options.merge is not None:
        merge(options.merge, options.out)
        return
    for model in options.models.split(","):
        print(model, flush=True)
        sections = set(options.sections or ONLY.get(model, SECTIONS))
        kept = Kept(options.out / f"engine_{model}.json")
        measure(model, sections, kept, options.runs, options.fresh)
        options.fresh = False


if __name__ == "__main__":
    main()
