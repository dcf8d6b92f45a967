"""Steps without a CUDA graph: what launching takes the host, beside the whole step and its floor.

    python benchmarks/eager_steps.py [--models llama-3.1-8b] [--out benchmarks/results/h200/eager_steps.json]

Prompts of more tokens than graphs are for are launched kernel by kernel. The GPU begins with the first kernel, so such
a step takes what the host needs or what the GPU needs, whichever is more. Each step runs with Triton's own way of
launching, and with launches that are remembered (``ops/lang/launches.py``), in turns. Both must draw the same tokens.
``--profile`` also prints where the host's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from pathlib import Path
from typing import Any

import torch
import triton

import record
from transect import LLM, SamplingParams
from transect.bench.floors import Rates, step_floor
from transect.engine.gpu.runner import GPURunner
from transect.engine.gpu.step_inputs import StepLayout
from transect.engine.gpu.step_sizes import width_bucket
from transect.explain.program import machine_ceilings
from transect.models.context import WholePrompts
from transect.models.cost import Row
from transect.models.storage import Storage
from transect.ops.lang.collecting import _functions
from transect.ops.lang.launches import Launches, remember

MODELS = ("llama-3.1-8b",)
TOKENS = (1040, 2048)
CONTEXT, ROUNDS = 4096, 3


def switch(on: bool) -> None:
    """Remember launches of all kernels of this package, or none."""
    for function in _functions():
        if on and not isinstance(function.run, Launches):
            remember(function, triton)
        elif not on:
            vars(function).pop("run", None)


def launched() -> int:
    """Launches so far that needed no look-up."""
    return sum(function.run.remembered for function in _functions() if isinstance(function.run, Launches))


def step(runner: GPURunner, tokens: int) -> tuple[float, float]:
    """One prompt of so many tokens: seconds until all is launched, and until the GPU has done it."""
    width = width_bucket(-(-tokens // runner._block_size), runner._block_size, runner._max_blocks)
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.inference_mode():
        layout = StepLayout(tokens, 1, 1, width)
        runner._run_padding(layout, [0, tokens], decode=False, whole=WholePrompts(0, 0), eager=True)
    handed = time.perf_counter() - began
    torch.cuda.synchronize()
    return handed, time.perf_counter() - began


def measured(runner: GPURunner, tokens: int) -> dict[str, Any]:
    """Both ways in turns."""
    ways: dict[str, list[tuple[float, float]]] = {"plain": [], "remembered": []}
    for turn in range(ROUNDS + 1):
        for name, found in ways.items():
            switch(name == "remembered")
            step(runner, tokens)  # what is new is looked up
            taken = step(runner, tokens)
            if turn:
                found.append(taken)
    return {
        name: {"host_s": record.summary([each[0] for each in found]), "step_s": record.summary([e[1] for e in found])}
        for name, found in ways.items()
    }


def profile(runner: GPURunner, tokens: int) -> None:
    """Prints the functions that take the host's time."""
    watched = cProfile.Profile()
    watched.enable()
    for _ in range(3):
        step(runner, tokens)
    watched.disable()
    pstats.Stats(watched).sort_stats("tottime").print_stats(32)


def drawn(llm: LLM) -> list[Any]:
    """Tokens of prompts of several lengths, together."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[10 + (7 * row + place) % 9000 for place in range(100 + 390 * row)] for row in range(6)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def tried(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model: its steps, and whether both ways draw the same."""
    llm = LLM(
        name, load_format="dummy", max_model_len=CONTEXT, max_num_seqs=16, max_num_batched_tokens=CONTEXT,
        kv_cache_tokens=4 * CONTEXT, cuda_graphs="off", enable_prefix_caching=False,
    )  # fmt: skip
    runner = llm._core.executor
    assert isinstance(runner, GPURunner)
    switch(False)
    expected = drawn(llm)
    switch(True)
    before = launched()
    same = all(drawn(llm) == expected for _ in range(2))
    print(f"{name}: {launched() - before} launches remembered, the same tokens: {same}", flush=True)
    rates = Rates.of(machine_ceilings(), "bfloat16")
    rows = []
    for tokens in TOKENS:
        least = step_floor(runner._model.config, [Row(tokens, tokens)], rates, Storage()).seconds
        rows.append({"tokens": tokens, "floor_s": least, **measured(runner, tokens)})
        plain, quick = rows[-1]["plain"], rows[-1]["remembered"]
        host, whole = (f"{1e3 * plain[what]['median']:.2f} ms" for what in ("host_s", "step_s"))
        ours, done = (f"{1e3 * quick[what]['median']:.2f} ms" for what in ("host_s", "step_s"))
        print(f"{name}, {tokens} tokens: floor {1e3 * least:.2f} ms", flush=True)
        print(f"  launched in {host}, done in {whole}; remembered: {ours}, {done}", flush=True)
    if options.profile:
        for on in (False, True):
            switch(on)
            profile(runner, TOKENS[0])
    layers = runner._model.config.n_layers
    del llm, runner
    gc.collect()
    torch.cuda.empty_cache()
    return {"model": name, "layers": layers, "same_tokens": same, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The host's time and the step's, both ways."""
    lines = [
        "| prompt | floor, ms | Triton's launches: host, ms | step, ms | remembered: host, ms | step, ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for model in result["models"]:
        for row in model["rows"]:
            ways = [row[way][what]["median"] for way in ("plain", "remembered") for what in ("host_s", "step_s")]
            shown = " | ".join(f"{1e3 * each:.1f}" for each in (row["floor_s"], *ways))
            lines.append(f"| {model['model']}, {row['tokens']} tokens | {shown} |")
    machine = result["environment"]
    return "\n".join(lines) + f"\n\n`{result['command']}` on {machine['gpu']}, {record.made_at([machine])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "eager_steps.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/eager_steps.py",
        "environment": record.environment() | {"gpu": torch.cuda.get_device_name()},
        "models": [],
    }
    for name in options.models:
        result["models"].append(tried(name, options))
        record.write(options.out, result)


if __name__ == "__main__":
    main()
