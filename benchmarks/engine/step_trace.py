"""Where a decode step's time goes: Python's share, and each kernel's, from the profiler's trace.

Kernels overlap (dependent launch), so durations add up to more than the step. Here the time in which several run
belongs to the one that began first, so the parts and the idle time add up to the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import _paths  # noqa: F401
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams

WARM, TIMED, TRACED = 20, 60, 20
"""Steps."""
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "top_k": 50},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
)


HOST = ("schedule", "submit", "read", "commit")
"""Parts of Python's time in a step: planning, filling the inputs and launching, splitting the result, delivering it."""


class _Watch:
    """Seconds of the parts of a step, by name; ``wait`` is for the device. Takes its place with ``with``."""

    def __init__(self, core: Any) -> None:
        self.core, self.inner = core, core.executor
        self.seconds = dict.fromkeys((*HOST, "wait"), 0.0)

    def __enter__(self) -> _Watch:
        scheduler = self.core.scheduler
        self.core.executor = self
        scheduler.schedule = self._timed("schedule", scheduler.schedule)
        scheduler.commit = self._timed("commit", scheduler.commit)
        self.submit = self._timed("submit", self._submit)
        return self

    def __exit__(self, *exception: object) -> None:
        self.core.executor = self.inner
        del self.core.scheduler.schedule, self.core.scheduler.commit

    def _submit(self, batch: Any) -> Any:
        return _TimedHandle(self, self.inner.submit(batch))

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments)
            self.seconds[name] += time.perf_counter() - start
            return result

        return run


class _TimedHandle:
    def __init__(self, watch: _Watch, handle: Any) -> None:
        self.watch, self.handle = watch, handle

    def draw(self) -> None:
        self.handle.draw()

    def result(self) -> Any:
        ready = getattr(self.handle, "ready", None)
        if ready is not None:
            self.watch._timed("wait", ready.synchronize)()
        return self.watch._timed("read", self.handle.result)()


def traced_steps(llm: LLM, prompts: Sequence[Sequence[int]], mixed: bool) -> dict[str, Any]:
    """Trace a steady decode of all prompts: host time of a step by part, GPU idle share, microseconds by kernel."""
    names = []
    for index, prompt in enumerate(prompts):
        params = {"temperature": 0.6, **(MIXED[index % len(MIXED)] if mixed else {})}
        names.append(llm.submit(prompt, SamplingParams(max_tokens=1000, ignore_eos=True, **params)))
    begun: set[str] = set()
    while len(begun) < len(names):
        begun |= {output.request_id for output in llm.step()}
    for _ in range(WARM):
        llm.step()
    with _Watch(llm._core) as watch:
        llm.step()
        torch.cuda.synchronize()
        watch.seconds = dict.fromkeys(watch.seconds, 0.0)
        start = time.perf_counter()
        for _ in range(TIMED):
            llm.step()
        wall = (time.perf_counter() - start) / TIMED
        parts = {name: seconds / TIMED for name, seconds in watch.seconds.items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED):
            llm.step()
        torch.cuda.synchronize()
    for name in names:
        llm.abort(name)
    while llm.has_work:
        llm.step()
    result = {
        "batch": len(prompts),
        "mixed_options": mixed,
        "step_s": wall,
        "host_s": wall - parts["wait"],
        "parts_s": parts,
        "steps_timed": TIMED,
        "steps_traced": TRACED,
        **read_trace(trace, TRACED),
    }
    kind = " mixed" if mixed else ""
    shown = ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in parts.items())
    print(
        f"  trace, batch {len(prompts)}{kind}: step {wall * 1e3:.3f} ms, host {1e3 * result['host_s']:.3f} ms "
        f"({shown}), GPU idle {result['idle_share']:.1%}; calls {result['host_calls']}"
    )
    for name, microseconds in list(result["microseconds_a_step"].items())[:24]:
        print(f"      {microseconds:9.1f} us  {name}")
    return result


def read_trace(trace: Any, steps: int) -> dict[str, Any]:
    """Read ``idle_share`` from the first kernel or copy to the last, CUDA ``host_calls`` by name,
    ``microseconds_a_step`` by kernel (see the top of this file), and ``span_us`` of a step."""
    spans: list[tuple[int, int, str]] = []
    calls: dict[str, int] = {}
    for event in trace.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), event.name()[:80]))
        elif event.name().startswith("cu"):
            calls[event.name()] = calls.get(event.name(), 0) + 1
    spans.sort()
    parts, busy = shares(spans)
    span = max(end for _, end, _ in spans) - spans[0][0]
    ordered = sorted(parts.items(), key=lambda pair: -pair[1])
    return {
        "idle_share": 1 - busy / span,
        "span_us": span / 1e3 / steps,
        "host_calls": calls,
        "microseconds_a_step": {name: nanoseconds / 1e3 / steps for name, nanoseconds in ordered},
    }


def shares(spans: Sequence[tuple[int, int, str]]) -> tuple[dict[str, int], int]:
    """Return (time by name, time in which anything ran) of (begin, end, name) in order of their beginning."""
    parts: dict[str, int] = {}
    busy, reached = 0, spans[0][0]
    for begin, end, name in spans:
        own = max(0, end - max(begin, reached))
        parts[name] = parts.get(name, 0) + own
        busy += own
        reached = max(reached, end)
    return parts, busy
