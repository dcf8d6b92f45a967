"""The portable kernels against Hopper's, on one Hopper GPU: decode and prefill of an 8B shape, beside the floor.

    python benchmarks/engine/portable.py [--target sm_89] [--formats bfloat16,fp8,int4] [--rows 1,16,64] [--ordinary]
    [--kernels] [--out FILE]

For each number format two engines with random weights are started, each in a process of its own: one as it is, one
that acts as ``--target`` (99 KiB of shared memory, no Hopper instructions). Both hold the GPU's memory at once and are
measured in turns. Decode: prompts of 512 tokens, the median over the rounds of the mean step; prefill: 16 prompts of
512. Of the kernels that the second one ran the script reads shared memory, spills and instructions of newer GPUs. Both
engines then answer the same prompts: the share of equal tokens is recorded. With ``--kernels`` a profile of each decode
step has its kernels in their order, each with the time from the end of the kernel before to its own end. With
``--ordinary`` a third engine has Hopper's kernels, which no card before has, but launches that begin when the one
before has ended, as on such a card. Under 4 minutes on an H100.

Each format has the command and the commit of its own run; formats that FILE has and this run does not measure stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.hardware.targets import SETTING, TARGETS

PROMPT, STEPS, PROMPTS = 512, 48, 16
LEAST_US = 10
"""Microseconds a step from which on a kernel is listed."""
NEWER = re.compile(r"\b(?:wgmma|griddepcontrol|cp\.async\.bulk|setmaxnreg|mapa)\b")
"""Instructions that compute capability 8.9 lacks, as PTX writes them."""
RATES = {"H100": (3.0e12, 700e12), "H200": (4.35e12, 750e12)}
"""Read bandwidth and rate of products in bfloat16 that programs reach."""


class Worker:
    """An engine in a process of its own, asked by lines of JSON."""

    def __init__(self, target: str, model: str, form: str, rows: int, ordinary: bool = False) -> None:
        environment = {name: value for name, value in os.environ.items() if name != SETTING}
        if target:
            environment[SETTING] = target
        command = [sys.executable, __file__, "--serve", json.dumps([model, form, rows, not ordinary])]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.name = target or ("ordinary" if ordinary else "own")

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return the answer to a request.

        Raises:
            RuntimeError: the process ended, or the request failed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{self.name}: {answer['error']}")
                return answer["found"]
        raise RuntimeError(f"{self.name}: the process ended with {self._process.wait()}")

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve(model: str, form: str, rows: int, dependent_launch: bool) -> None:
    """Answer requests from standard input with an engine of this process."""
    import torch

    from transect.bench.offline import decode_steps, prefill_seconds
    from transect.engine.executors.gpu.options import GPUOptions
    from transect.engine.frontends.llm import LLM
    from transect.engine.scheduling.sampling_params import SamplingParams
    from transect.ops.lang.jit import triton

    kernels: dict[str, dict[str, Any]] = {}
    before = triton.knobs.compilation.listener

    def heard(*, src: Any, metadata: dict[str, Any], metadata_group: Mapping[str, str], **others: Any) -> None:
        if before is not None:
            before(src=src, metadata=metadata, metadata_group=metadata_group, **others)
        ptx = next((Path(path).read_text() for name, path in metadata_group.items() if name.endswith(".ptx")), "")
        newer = sorted(set(NEWER.findall(ptx)))
        kernels[metadata["hash"]] = {"name": src.name, "shared": metadata["shared"], "newer": newer}

    triton.knobs.compilation.listener = heard
    began = time.perf_counter()
    llm = LLM(
        model,
        load_format="dummy",
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=max(rows, PROMPTS),
        kv_cache_tokens=640 * max(rows, PROMPTS),
        quantization=None if form == "bfloat16" else form,
        cuda_graphs="lazy",
        gpu=GPUOptions(dependent_launch=dependent_launch),
        seed=0,
    )
    started = time.perf_counter() - began

    def tokens(count: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 10000, (count, PROMPT), generator=generator).tolist()

    def answers(count: int, drawn: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=drawn, ignore_eos=True)
        found: dict[str, list[int]] = {llm.submit(prompt, params): [] for prompt in tokens(count, 77)}
        while llm.has_work:
            for output in llm.step():
                found[output.request_id] += output.new_token_ids
        return list(found.values())

    def decode(count: int, seed: int) -> float:
        return decode_steps(llm, tokens(count, seed), STEPS, -(-count * PROMPT // 8192) + 2).per_token

    def of_kernels(count: int) -> list[dict[str, Any]]:
        """Return the kernels of a decode step, in their order: launches and microseconds a step, from the end of the
        kernel before to the own end. Launches of one kernel are apart by their grid and the kernel before."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            decode(count, 0)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        ran = sorted((each for each in events if each.get("cat") == "kernel"), key=lambda each: each["ts"])
        ran = ran[len(ran) // 2 :]  # prompts came before
        steps = max(1, sum("embed" in event["name"] for event in ran))
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        before, ended = "", 0.0
        for event in ran:
            name, grid, end = event["name"][:60], event["args"]["grid"], event["ts"] + event["dur"]
            row = found.setdefault((name, str(grid), before), {"kernel": name, "grid": grid, "count": 0.0, "us": 0.0})
            row["count"] += 1 / steps
            row["us"] += max(0, end - max(ended, event["ts"] - 10)) / steps
            before, ended = name, max(ended, end)
        return [row for row in found.values() if row["count"] > 0.5 and row["us"] >= LEAST_US]

    asked: dict[str, Callable[..., Any]] = {
        "start": lambda: {"seconds": started, "kernels": llm.kernels, "gpu": torch.cuda.get_device_name()},
        "decode": decode,
        "prefill": lambda seed: prefill_seconds(llm, tokens(PROMPTS, seed)),
        "answers": answers,
        "compiled": lambda: list(kernels.values()),
        "of_kernels": of_kernels,
    }
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = {"found": asked[what](*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def pair(target: str, model: str, form: str, rows: Sequence[int], ordinary: bool) -> list[Worker]:
    """Start both engines of a format, and one of ``ordinary`` launches."""
    third = [Worker("", model, form, max(rows), ordinary=True)] if ordinary else []
    return [Worker("", model, form, max(rows)), Worker(target, model, form, max(rows)), *third]


def race(
    workers: list[Worker], target: str, model: str, form: str, rows: Sequence[int], rounds: int, kernels: bool
) -> dict[str, Any]:
    """Measure both engines in one format, in turns, and end them."""
    from transect.costs.floors import Rates, step_floor
    from transect.costs.model import Row
    from transect.costs.storage import storage_for
    from transect.spec.shapes import PRESETS

    try:
        starts = [worker.ask("start") for worker in workers]
        gpu = starts[0]["gpu"]
        rates = Rates(*next(rates for name, rates in RATES.items() if name in gpu))
        storage = storage_for(2, None if form == "bfloat16" else form)
        found: dict[str, Any] = {"gpu": gpu, "kernels": [start["kernels"] for start in starts], "decode": []}
        found["start_seconds"] = [start["seconds"] for start in starts]
        print(f"{form}: started in {starts[0]['seconds']:.0f} and {starts[1]['seconds']:.0f} s", flush=True)
        for count in rows:
            times: list[list[float]] = [[] for _ in workers]
            for turn in range(rounds + 1):
                for worker, into in zip(workers, times, strict=True):
                    seconds = worker.ask("decode", count, turn)
                    if turn:
                        into.append(seconds)
            lengths = [Row(1, PROMPT + STEPS // 2)] * count
            floor = step_floor(PRESETS[model], lengths, rates, storage).seconds
            row = _row(times, floor)
            if kernels:
                row["kernels"] = {worker.name: worker.ask("of_kernels", count) for worker in workers}
            found["decode"].append({"rows": count, **row})
            _say(f"  decode, {count} rows", row)
        times = [[] for _ in workers]
        for turn in range(rounds + 1):
            for worker, into in zip(workers, times, strict=True):
                seconds = worker.ask("prefill", turn)
                if turn:
                    into.append(seconds)
        floor = step_floor(PRESETS[model], [Row(PROMPT, PROMPT)] * PROMPTS, rates, storage).seconds
        found["prefill"] = {"tokens": PROMPTS * PROMPT, **_row(times, floor)}
        _say(f"  prefill, {PROMPTS * PROMPT} tokens", found["prefill"])
        both = [worker.ask("answers", 16, 4) for worker in workers[:2]]
        pairs = [(a, b) for ours, theirs in zip(*both, strict=True) for a, b in zip(ours, theirs, strict=True)]
        found["equal_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
        found["equal_first_tokens"] = sum(a[0] == b[0] for a, b in zip(*both, strict=True)) / len(both[0])
        compiled = workers[1].ask("compiled")
        limit = TARGETS[target].block_bytes
        found["compiled"] = {
            "count": len(compiled),
            "names": sorted({kernel["name"] for kernel in compiled}),
            "most_shared_bytes": max((kernel["shared"] for kernel in compiled), default=0),
            "limit_bytes": limit,
            "with_newer_instructions": [kernel for kernel in compiled if kernel["newer"]],
        }
        newer, most = found["compiled"]["with_newer_instructions"], found["compiled"]["most_shared_bytes"]
        print(f"  equal tokens {found['equal_tokens']:.0%}, first {found['equal_first_tokens']:.0%}")
        print(
            f"  {len(compiled)} Triton kernels, shared memory {most} of {limit}, newer instructions: {newer}",
            flush=True,
        )
        return found
    finally:
        for worker in workers:
            worker.stop()


def _row(times: Sequence[Sequence[float]], floor: float) -> dict[str, Any]:
    own, portable, *ordinary = (record.summary(each) for each in times)
    slower = portable["median"] / own["median"]
    found = {"own_s": own, "portable_s": portable, "floor_s": floor, "portable_over_own": slower}
    return found | ({"ordinary_s": ordinary[0]} if ordinary else {})


def _say(name: str, row: Mapping[str, Any]) -> None:
    own, portable = row["own_s"]["median"], row["portable_s"]["median"]
    print(
        f"{name}: {own * 1e3:.3f} ms, portable {portable * 1e3:.3f} ms ({portable / own:.3f} times), floor "
        f"{row['floor_s'] * 1e3:.3f} ms ({row['floor_s'] / portable:.0%})"
        + (f", ordinary launches {row['ordinary_s']['median'] * 1e3:.3f} ms" if "ordinary_s" in row else ""),
        flush=True,
    )
    for name, kernels in row.get("kernels", {}).items():
        print(f"    {name}: {sum(each['us'] for each in kernels):.0f} us a step")
        for each in kernels:
            print(f"      {each['us']:7.1f} us in {each['count']:5.1f} of {each['kernel']} {each['grid']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_89")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--formats", default="bfloat16,fp8,int4")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ordinary", action="store_true", help="Also race Hopper's kernels in ordinary launches.")
    parser.add_argument("--kernels", action="store_true", help="Profile each decode step.")
    parser.add_argument("--together", action="store_true", help="Start the engines of all formats first: 120 GB.")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h100" / "portable.json")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*json.loads(options.serve))
        return
    rows = [int(each) for each in options.rows.split(",")]
    run = {"command": record.command("benchmarks/engine/portable.py")}
    run |= {"environment": record.environment(("torch", "triton"))}
    result: dict[str, Any] = {"target": options.target, "model": options.model, "formats": {}}
    if options.out.exists():
        kept = json.loads(options.out.read_text())
        if (kept["target"], kept["model"]) == (options.target, options.model):
            result = kept
    forms = options.formats.split(",")
    started = {
        form: pair(options.target, options.model, form, rows, options.ordinary) for form in forms if options.together
    }
    for form in forms:
        workers = started.get(form) or pair(options.target, options.model, form, rows, options.ordinary)
        try:
            result["formats"][form] = run | race(
                workers, options.target, options.model, form, rows, options.rounds, options.kernels
            )  # fmt: skip
        except RuntimeError as error:
            result["formats"][form] = run | {"error": str(error)}
            print(error, flush=True)
        record.write(options.out, result)


if __name__ == "__main__":
    main()
