"""Gains of the GPU engine's optimizations: the same short work with each of them off.

Prefill of 256 prompts of 512 tokens, then decode steps of all of them, of 64 and of 1 (median of the steps).
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import _paths  # noqa: F401
from transect.engine.executors.gpu import setup
from transect.engine.executors.gpu.options import GPUOptions
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams

ABLATIONS: dict[str, dict[str, Any]] = {
    "everything on": {},
    "CUDA graphs off": {"cuda_graphs": "off"},
    "async scheduling off": {"async_scheduling": False},
    "device sampling off": {"gpu": GPUOptions(device_sampling=False)},
    "prefill graphs off": {"tricks": {"graph_tokens": 0}},
    "prompt attention off": {"tricks": {"whole_prompts": None}},
    "last layer in full": {"tricks": {"prune_last_layer": False}},
    "dependent launch off": {"gpu": GPUOptions(dependent_launch=False)},
    "fused operators off": {"gpu": GPUOptions(fused_operators=False)},
    "copy kernels off": {"tricks": {"copy_kernels": False}},
}
"""Settings of the engine; ``tricks`` replaces options of ``GPURunner``, which users cannot set."""
BATCHES = (256, 64, 1)
STEPS = 48
LONGEST_S = 1.0
"""Seconds at one batch after which no further steps are timed."""


def built(build: Callable[..., LLM], tricks: Mapping[str, Any] | None = None, **settings: Any) -> LLM:
    """Build an engine whose ``GPURunner`` has other options than the shipping ones."""
    shipping = setup.runner_tricks
    with mock.patch.object(setup, "runner_tricks", lambda *arguments: shipping(*arguments) | dict(tricks or {})):
        return build(**settings)


def short_work(llm: LLM, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Measure the seconds of the prefill, and of a decode step by batch."""
    params = SamplingParams(max_tokens=len(BATCHES) * (STEPS + 8) + 64, temperature=0.6, ignore_eos=True)
    start = time.perf_counter()
    names = [llm.submit(prompt, params) for prompt in prompts]
    begun: set[str] = set()
    while len(begun) < len(names):
        begun |= {output.request_id for output in llm.step()}
    found: dict[str, Any] = {"prefill_s": time.perf_counter() - start, "decode_s": {}}
    for batch in BATCHES:
        while len(names) > batch:
            llm.abort(names.pop())
        for _ in range(4):
            llm.step()
        taken: list[float] = []
        while len(taken) < STEPS and sum(taken) < LONGEST_S:
            begin = time.perf_counter()
            llm.step()
            taken.append(time.perf_counter() - begin)
        found["decode_s"][batch] = statistics.median(taken)
    llm.abort(names.pop())
    while llm.has_work:
        llm.step()
    return found


def ablation(
    build: Callable[..., LLM],
    prompts: Sequence[Sequence[int]],
    release: Callable[[], None],
    keep: Callable[[dict[str, Any]], None],
    warm: int,
) -> dict[str, Any]:
    """Run the short work on an engine for each entry of ``ABLATIONS``. ``keep`` is called with the results so far after
    each, and each gets the first ``warm`` prompts before."""
    found: dict[str, Any] = {}
    for name, settings in ABLATIONS.items():
        llm = None
        try:
            llm = built(build, **settings)
            for prompt in prompts[:warm]:
                llm.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
            while llm.has_work:
                llm.step()
            found[name] = short_work(llm, prompts)
            decode = ", ".join(f"{batch}: {1e3 * seconds:.2f} ms" for batch, seconds in found[name]["decode_s"].items())
            print(f"  {name}: prefill {found[name]['prefill_s']:.2f} s, decode {decode}", flush=True)
        except Exception:
            traceback.print_exc()
        keep(found)
        del llm
        release()
    return found
