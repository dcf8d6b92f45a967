"""GPU time of an engine's steps by kind, of two ways to compute: where one of them takes longer.

A kind is the padded number of tokens, and if all rows decode, if the step has prompts too, or prompts alone. The time
of a step is the GPU's, between CUDA events around its launches; the gap is the GPU's time between two steps, in which
it waits for the host. Launches kernel by kernel of a step that the GPU overtakes count as its time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks.engine.step_trace import read_trace
from transect.bench.workload import Work
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams

Kinds = dict[str, dict[str, float]]


class StepClock:
    """Events around the launches of every step. Takes its place with ``with``."""

    def __init__(self, llm: LLM) -> None:
        self.runner: Any = llm._core.executor
        self.steps: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> StepClock:
        launch = self.runner._run

        def timed(plan: Any, eager: bool = False) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self.runner._stream)
            found = launch(plan, eager)
            end.record(self.runner._stream)
            decodes = plan.decode or any(len(row.token_ids) == 1 for row in plan.rows)
            of = "decode" if plan.decode else "decode and prompts" if decodes else "prompts"
            self.steps.append((f"{plan.layout.tokens} {of}, {self.runner.launched}", begin, end))
            return found

        self.runner._run = timed
        return self

    def __exit__(self, *exception: object) -> None:
        del self.runner._run

    def kinds(self) -> Kinds:
        """Return for each kind: number of steps, median and total milliseconds of the GPU, and those of gaps before."""
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        gaps: dict[str, float] = {}
        before = None
        for kind, begin, end in self.steps:
            times.setdefault(kind, []).append(begin.elapsed_time(end))
            gaps[kind] = gaps.get(kind, 0.0) + (0.0 if before is None else before.elapsed_time(begin))
            before = end
        return {
            kind: {"steps": len(each), "median_ms": statistics.median(each), "ms": sum(each), "gap_ms": gaps[kind]}
            for kind, each in times.items()
        }


def compared(usual: Kinds, other: Kinds) -> list[dict[str, Any]]:
    """List kinds by the time that ``other`` takes more, the largest first, and print them."""
    none = {"steps": 0, "median_ms": 0.0, "ms": 0.0, "gap_ms": 0.0}
    rows = []
    for kind in {**usual, **other}:
        one, two = usual.get(kind, none), other.get(kind, none)
        rows.append({"kind": kind, "usual": one, "other": two, "more_ms": two["ms"] - one["ms"]})
    rows.sort(key=lambda row: -row["more_ms"])
    whole = sum(row["more_ms"] for row in rows)
    print(f"  more GPU time: {whole:.0f} ms; gaps {total(usual, 'gap_ms'):.0f} and {total(other, 'gap_ms'):.0f} ms")
    for row in rows:
        one, two = row["usual"], row["other"]
        print(
            f"    {row['kind']:32} {one['steps']:5} {two['steps']:5} steps of {one['median_ms']:8.3f}"
            f" {two['median_ms']:8.3f} ms, {one['ms']:8.1f} {two['ms']:8.1f} ms together, gaps {one['gap_ms']:7.1f}"
            f" {two['gap_ms']:7.1f}: {row['more_ms']:+8.1f} ms",
            flush=True,
        )
    return rows


def total(kinds: Kinds, name: str) -> float:
    """Sum one number over all kinds."""
    return sum(kind[name] for kind in kinds.values())


def traced_at(llm: LLM, work: Sequence[Work], steps: Sequence[int], count: int = 10) -> None:
    """Run a workload, trace ``count`` steps from each of ``steps`` on, and print microseconds by kernel."""
    names = []
    for each in work:
        params = SamplingParams(max_tokens=each.output_tokens, temperature=0.6, ignore_eos=True)
        assert not isinstance(each.prompt, str)
        names.append(llm.submit(each.prompt, params))
    step = 0
    for first in steps:
        while step < first:
            llm.step()
            step += 1
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(count):
                llm.step()
            torch.cuda.synchronize()
        step += count
        found = read_trace(trace, count)
        print(f"    steps {first} to {step}: {found['span_us']:.0f} us each", flush=True)
        for name, microseconds in list(found["microseconds_a_step"].items())[:14]:
            print(f"      {microseconds:9.1f} us  {name}", flush=True)
    for name in names:
        llm.abort(name)
    while llm.has_work:
        llm.step()
