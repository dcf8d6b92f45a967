"""A mixture of experts on one GPU: its operators, decode and prefill of a true shape, beside floors and torch.

    python benchmarks/engine/moe.py [SECTION ...] [--model qwen3-30b-a3b] [--batches 1,16,64,256] [--out FILE]

Sections: ops, decode, prefill; and layouts, on two GPUs. Random weights of a true shape. ``ops``: the
products of one layer's experts as ``ops/moe`` computes them, beside ``torch.nn.functional.grouped_mm`` on
rows that are sorted already, and beside the floor of the experts that the rows touch. ``decode``: prompts of
512 tokens, 64 steps; wall time of a step as the caller of ``LLM.step`` sees it, the floor of the experts that
a step touched (counted by layers in steps after it), and the share of a step that each kind of kernel takes.
``prefill``: 64 prompts of 512 tokens. ``layouts``: decode with experts cut between two GPUs, shared by them,
or in two stages of layers; tokens a second of all sequences, and half of the floor of one GPU. Rates as in
``engine/gpu.py``.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import RATES, engine, prompts, release
from benchmarks.engine.step_trace import traced_steps
from transect.bench.offline import decode_steps, prefill_seconds
from transect.costs.floors import step_floor
from transect.costs.model import Row
from transect.costs.work import touched
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.models.moe import MoE
from transect.ops.moe.ordering import draw
from transect.ops.registry import get
from transect.ops.tools.timing import time_graph
from transect.parallel.launch import Ranks
from transect.spec.model import ModelConfig
from transect.spec.shapes import PRESETS

SECTIONS = ("ops", "decode", "prefill")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2, experts shared": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "stages 2": {"pipeline_parallel_size": 2},
    "tensor 2": {"tensor_parallel_size": 2},
    "data 2, experts shared": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
STEPS, COPIES = 64, 6
KINDS = {
    "products of experts": ("_grouped",),
    "routing": ("_route", "_gating", "_count", "_place", "_combine"),
    "attention": ("paged", "attention", "rotary", "decode_", "_merge"),
}
"""Words in the names of kernels, by what they do; the rest is "other"."""


def expert_bytes(config: ModelConfig) -> int:
    """Return the bytes of one expert in bfloat16."""
    assert config.moe is not None
    return 3 * config.moe.expert_dim * config.dim * 2


def products(config: ModelConfig, tokens: int) -> dict[str, Any]:
    """Measure the seconds of gate, up and down of one layer, sorted and unsorted, in graphs over COPIES layers'
    weights."""
    moe = config.moe
    assert moe is not None
    triton = {
        name: get(name).implementations["triton"].load()
        for name in ("grouped_linear", "grouped_gate_up", "expert_order")
    }
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows = tokens * moe.per_token
    copies = COPIES if tokens < 1024 else 2
    shapes = {
        "gate": (moe.expert_dim, config.dim),
        "gate and up": (moe.expert_dim, config.dim),
        "down": (config.dim, moe.expert_dim),
    }
    x = torch.randn(tokens, config.dim, **options)
    sorted_rows = {name: torch.randn(rows, inputs, **options) for name, (_, inputs) in shapes.items()}
    experts = [draw(tokens, moe.per_token, moe.experts, seed, "cuda") for seed in range(copies)]
    orders = [triton["expert_order"](each, moe.experts) for each in experts]
    distinct = sum(len(each.unique()) for each in experts) / copies
    found: dict[str, Any] = {"tokens": tokens, "distinct_experts": distinct}
    for name, (outputs, inputs) in shapes.items():
        weights = [0.02 * torch.randn(moe.experts * outputs, inputs, **options) for _ in range(copies)]

        def ours(index: int, name: str = name, weights: list[Any] = weights) -> Any:
            order, _, starts = orders[index]
            if name == "gate and up":
                return triton["grouped_gate_up"](x, weights[index], weights[index - 1], starts, order)
            given, how = (sorted_rows["down"], None) if name == "down" else (x, order)
            return triton["grouped_linear"](given, weights[index], starts, how)

        def torchs(index: int, name: str = name, weights: list[Any] = weights) -> Any:
            stacked = weights[index].unflatten(0, (moe.experts, -1)).transpose(1, 2)
            y = F.grouped_mm(sorted_rows[name], stacked, offs=orders[index][2][1:])
            if name != "gate and up":
                return y
            other = weights[index - 1].unflatten(0, (moe.experts, -1)).transpose(1, 2)
            return F.silu(y) * F.grouped_mm(sorted_rows[name], other, offs=orders[index][2][1:])

        moved, matrices = rows * (inputs + outputs) * 2, 1 + (name == "gate and up")
        floor = max((matrices * distinct * outputs * inputs * 2 + moved) / RATES.bytes_per_second,
                    matrices * 2 * rows * outputs * inputs / RATES.flops_per_second)  # fmt: skip
        for label, call in (("ours", ours), ("torch", torchs)):
            try:
                calls: list[Callable[[], Any]] = [lambda i=index, call=call: call(i) for index in range(copies)]
                found[f"{name}_{label}"] = record.summary(time_graph(calls))
            except Exception as error:
                found[f"{name}_{label}"] = {"error": str(error).splitlines()[0][:200]}
        found[f"{name}_floor"] = floor
        shown = ", ".join(
            f"{label} {1e6 * found[f'{name}_{label}']['median']:.1f} us"
            if "median" in found[f"{name}_{label}"]
            else f"{label}: {found[f'{name}_{label}']['error'][:80]}"
            for label in ("ours", "torch")
        )
        print(f"  {name} of {tokens} tokens: {shown}, floor {floor * 1e6:.1f} ({distinct:.0f} experts)", flush=True)
    return found


def steps_touch(llm: LLM, batch: int) -> float:
    """Count the experts that a layer reads in a decode step of ``batch`` sequences, on average over layers and two
    steps."""
    runner: Any = llm._core.executor
    graphs, runner.graphs = runner.graphs, None  # kernel by kernel, so that layers can be watched
    layers = [layer.mlp for layer in runner._model.layers if isinstance(layer.mlp, MoE)]
    seen: list[torch.Tensor] = []
    names = [llm.submit(prompt, SamplingParams(max_tokens=64, ignore_eos=True)) for prompt in prompts(batch, 7)]
    begun: set[str] = set()
    while len(begun) < len(names):
        begun |= {output.request_id for output in llm.step()}
    llm.step()
    for layer in layers:
        layer.watch = lambda logits, experts: seen.append(experts)
    llm.step()
    llm.step()
    for layer in layers:
        layer.watch = None
    torch.cuda.synchronize()
    for name in names:
        llm.abort(name)
    while llm.has_work:
        llm.step()
    runner.graphs = graphs
    return sum(len(each.unique()) for each in seen) / len(seen)


def by_kind(microseconds: dict[str, float]) -> dict[str, float]:
    """Return the shares of the kernels' time by their function."""
    total, found = sum(microseconds.values()), dict.fromkeys((*KINDS, "other"), 0.0)
    for name, each in microseconds.items():
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        found[kind] += each / total
    return found


def decode(llm: LLM, config: ModelConfig, batch: int, runs: int) -> dict[str, Any]:
    """Measure the seconds of a step beside the floor of the experts that it reads, and their shares by kernel."""
    assert config.moe is not None
    decode_steps(llm, prompts(batch, 50), 8, -(-batch * 512 // 8192) + 2)
    found = [decode_steps(llm, prompts(batch, seed), STEPS, -(-batch * 512 // 8192) + 2) for seed in range(runs)]
    times = record.summary([each.per_token for each in found])
    even = step_floor(config, [Row(1, length) for length in found[0].middle], RATES).seconds
    distinct, evenly = steps_touch(llm, batch), touched(batch, config.moe.per_token, config.moe.experts)
    floor = even + config.n_layers * (distinct - evenly) * expert_bytes(config) / RATES.bytes_per_second
    trace = traced_steps(llm, prompts(batch, 1), False)
    shares = by_kind(trace["microseconds_a_step"])
    said = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    print(
        f"  decode batch {batch}: {times['median'] * 1e3:.3f} ms, floor {floor * 1e3:.3f} ({distinct:.0f} experts a "
        f"layer; {evenly:.0f} if even: {even * 1e3:.3f}), {floor / times['median']:.1%}; {said}",
        flush=True,
    )
    return {
        "batch": batch, "step_s": times, "floor_s": floor, "floor_even_s": even, "distinct_experts": distinct,
        "of_floor": floor / times["median"], "shares": shares, "trace": trace,
    }  # fmt: skip


def layout(model: str, name: str, batch: int, llm: LLM) -> dict[str, Any]:
    """Measure tokens per second of a steady decode: ``STEPS`` steps of a sequence, counted from outside."""
    generator = torch.Generator().manual_seed(batch)
    given = torch.randint(0, 10000, (batch, 128), generator=generator).tolist()
    names = [llm.submit(prompt, SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)) for prompt in given]
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in llm.step()}
    for _ in range(24):
        llm.step()
    drawn, start = 0, time.perf_counter()
    while time.perf_counter() - start < 1.0:
        drawn += sum(len(output.new_token_ids) for output in llm.step())
    seconds = time.perf_counter() - start
    for each in names:
        llm.abort(each)
    while llm.has_work:
        llm.step()
    one = step_floor(PRESETS[model], [Row(1, 180)] * batch, RATES).seconds
    rate, least = drawn / seconds, one / 2
    print(
        f"  {name}, batch {batch}: {rate:,.0f} tok/s, {batch / rate * 1e3:.3f} ms a token of a sequence; half of one "
        f"GPU's floor {least * 1e3:.3f}",
        flush=True,
    )
    return {"layout": name, "batch": batch, "tokens_per_s": rate, "token_s": batch / rate, "half_floor_s": least}


def layouts(model: str, batches: list[int], keep: Callable[[Any], object]) -> None:
    """Measure every layout on two GPUs, one engine after another."""
    ranks = Ranks.start(2, "cuda")
    for name, sizes in LAYOUTS.items():
        try:
            llm = engine(model, cuda_graphs="lazy", max_num_seqs=256, kv_cache_tokens=131072, ranks=ranks, **sizes)
            try:
                for batch in batches:
                    keep(layout(model, name, batch, llm))
            finally:
                llm.close()
                del llm
                release()
        except Exception:
            traceback.print_exc()
    ranks.close()


def prefill(llm: LLM, config: ModelConfig, runs: int) -> dict[str, Any]:
    """Measure 64 prompts of 512 tokens, one token drawn for each."""
    prefill_seconds(llm, prompts(32, 90))
    times = record.summary([prefill_seconds(llm, prompts(64, seed)) for seed in range(runs)])
    floor = step_floor(config, [Row(512, 512)] * 64, RATES, logit_rows=64).seconds
    print(f"  prefill 64 x 512: {times['median']:.3f} s, floor {floor:.3f}, {floor / times['median']:.1%}", flush=True)
    return {"seconds": times, "floor_s": floor, "of_floor": floor / times["median"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=[n for n, each in PRESETS.items() if each.moe])
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "moe_gpu.json")
    options = parser.parse_args()
    sections = options.sections or SECTIONS
    batches = [int(batch) for batch in options.batches.split(",")]
    config = PRESETS[options.model]
    result: dict[str, Any] = {
        "environment": {**record.environment(("torch", "triton")), "rates": RATES.device},
        "gpu": torch.cuda.get_device_name(),
        "model": options.model,
        "ops": [],
        "decode": [],
        "layouts": [],
    }

    def attempt(work: Callable[[], Any], keep: Callable[[Any], object]) -> None:
        try:
            keep(work())
        except Exception:
            traceback.print_exc()
        record.write(options.out, result)

    def keep_layout(found: dict[str, Any]) -> None:
        result["layouts"].append(found)
        record.write(options.out, result)

    if "layouts" in sections:
        layouts(options.model, batches, keep_layout)
    if "ops" in sections:
        for tokens in (*batches, 8192):
            attempt(lambda tokens=tokens: products(config, tokens), result["ops"].append)
            release()
    if {"decode", "prefill"} & set(sections):
        llm = engine(options.model, cuda_graphs="lazy")
        print(f"{options.model}: {llm.kernels}", flush=True)
        decode_steps(llm, prompts(16, 99), 8, 4)  # warm
        if "decode" in sections:
            for batch in batches:
                attempt(lambda batch=batch: decode(llm, config, batch, options.runs), result["decode"].append)
        if "prefill" in sections:
            attempt(lambda: prefill(llm, config, options.runs), lambda found: result.update(prefill=found))


if __name__ == "__main__":
    main()
