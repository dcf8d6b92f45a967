"""Number formats of weights on one GPU: decode, the throughput protocol and the products alone, each beside its floor.

    python benchmarks/formats/gpu.py bf16 fp8 int8 int4 [--model llama-3.1-8b] [--batches 1,8,64,256] [--out FILE]
    python benchmarks/formats/gpu.py products             one layer's matrices, times of their products by rows

``q4_k_m``: blocks of GGUF files of random bits, of the types that llama.cpp gives the matrices of such a file.

Random weights of a true shape. Decode: prompts of 512 tokens; the wall time of a step as the caller of ``LLM.step``
sees it. A format's floor is of the bytes that its own weights take, at the rates of ``engine/gpu.py``; arithmetic
counts at bfloat16's rate, so fp8's floor for many rows is on the safe side. What is measured takes the place of the
same section of an earlier run in FILE, and one part that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import PROMPT, RATES, Kept, engine, prompts, release
from benchmarks.engine.step_trace import traced_steps
from transect.bench.offline import decode_steps, prefill_seconds, run_all
from transect.bench.workload import throughput_protocol
from transect.checkpoints import load
from transect.checkpoints.dummy import dummy_weights
from transect.costs.floors import batch_floor, step_floor
from transect.costs.model import Row
from transect.costs.storage import Storage, storage_for
from transect.engine.executors.gpu import build
from transect.engine.frontends.llm import LLM
from transect.models.stored import BlockCodes, Stored
from transect.models.weights.kinds import kinds_for
from transect.ops.linear.packed.gguf.gguf_matmul import random_blocks
from transect.ops.opset import resolve_ops
from transect.spec.numbers.gguf import UNITS
from transect.spec.numbers.layouts import BlockLayout
from transect.spec.shapes import PRESETS
from transect.spec.weights import weight_shapes

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8-kv8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "bf16-kv8": {"kv_cache_dtype": "fp8"},
    "bf16-kv-int8": {"kv_cache_dtype": "int8"},
    "q4_k_m": {},
    "q8_0": {},
}
"""Settings of the engine by format."""
FILES = {"q4_k_m": "q4_k_m", "q8_0": "q8_0"}
"""The file of each format of GGUF files."""
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs of the matrices of a layer of Llama 3.1 8B."""


def block_type(file: str, name: str, layers: int) -> str:
    """Return the type of a matrix ``layers.3.mlp.down`` or ``head`` in a GGUF file."""
    if file == "q8_0" or name == "head":
        return "Q8_0" if file == "q8_0" else "Q6_K"
    _, layer, inner = name.split(".", 2)
    more = int(layer) < layers // 8 or int(layer) >= 7 * layers // 8 or (int(layer) - layers // 8) % 3 == 2
    return "Q6_K" if more and inner in ("mlp.down", "attention.v") else "Q4_K"


def hold_in_blocks(file: str, model: str) -> None:
    """Make later engines use random blocks."""
    config = PRESETS[model]

    def layout(name: str) -> BlockLayout:
        kind = block_type(file, name, config.n_layers)
        return BlockLayout(UNITS[kind])

    def weights(*_: Any, **__: Any) -> Any:
        for name, stored in dummy_weights(config, device="cuda"):
            inner = name.removesuffix(".weight")
            if len(stored.shape) != 2 or not (inner.startswith("layers.") or inner == "head"):
                yield name, stored
                continue
            own = layout(inner)

            def codes(rows: slice, columns: slice, own: BlockLayout = own, shape: Any = stored.shape) -> BlockCodes:
                return BlockCodes(own, random_blocks(own.units.name, shape[0], shape[1], "cuda"))

            yield name, Stored(stored.shape, stored.reader, own, codes)

    first = f"layers.{config.n_layers // 2}."
    own = [name.removesuffix(".weight") for name, shape in weight_shapes(config).items() if len(shape) == 2]
    layouts = tuple((name.removeprefix(first), layout(name)) for name in own if name.startswith((first, "head")))
    build.held_layouts = lambda source: layouts
    load.stored_weights = weights


def storage(name: str) -> Storage:
    """Return the storage of the numbers of an engine of this format."""
    if name in FILES:
        kinds = {each: UNITS[each].bits for each in ("Q4_K", "Q6_K", "Q8_0")}
        if FILES[name] == "q8_0":
            return replace(storage_for(2), linear=kinds["Q8_0"], head=kinds["Q8_0"])
        half = (kinds["Q4_K"] + kinds["Q6_K"]) / 2
        mixed = (("mlp.down", half), ("attention.v", half))
        return replace(storage_for(2), linear=kinds["Q4_K"], head=kinds["Q6_K"], matrices=mixed)
    made = storage_for(2, FORMATS[name].get("quantization"))
    stored = FORMATS[name].get("kv_cache_dtype")
    return made if stored is None else replace(made, kv=8.25 if stored == "int8" else 8.0)  # heads of 128, a scale each


def decode(llm: LLM, name: str, model: str, batch: int, steps: int, runs: int) -> dict[str, Any]:
    """Measure the seconds of a step beside the floor of the format's bytes."""
    spare = batch // 2 + 16  # what decodes while others are still in prefill, where a format cuts that into small steps
    found = [decode_steps(llm, prompts(batch, seed), steps, spare) for seed in range(runs)]
    floor = step_floor(PRESETS[model], [Row(1, n) for n in found[0].middle], RATES, storage(name)).seconds
    times = record.summary([each.per_token for each in found])
    share = floor / times["median"]
    print(f"  {name} batch {batch}: {times['median'] * 1e3:.3f} ms, floor {floor * 1e3:.3f}, {share:.1%}", flush=True)
    return {"batch": batch, "step_s": times, "floor_s": floor, "of_floor": share}


def throughput(llm: LLM, name: str, model: str) -> dict[str, Any]:
    """Run the throughput protocol once."""
    work = throughput_protocol()
    out = sum(each.output_tokens for each in work)
    seconds, steps = run_all(llm, work)
    lengths = [(len(each.prompt), each.output_tokens) for each in work]
    floor = sum(part.seconds for part in batch_floor(PRESETS[model], lengths, RATES, storage(name)))
    print(f"  {name} throughput: {out / seconds:.0f} tok/s, floor {out / floor:.0f}, {floor / seconds:.1%}", flush=True)
    return {
        "seconds": seconds,
        "steps": steps,
        "tokens_per_s": out / seconds,
        "floor_tokens_per_s": out / floor,
        "of_floor": floor / seconds,
    }


def prefill(llm: LLM, name: str, model: str, runs: int) -> dict[str, Any]:
    """Measure the seconds for 128 prompts of ``PROMPT`` tokens, one token drawn for each."""
    prefill_seconds(llm, prompts(32, runs))
    times = record.summary([prefill_seconds(llm, prompts(128, seed)) for seed in range(runs)])
    floor = step_floor(PRESETS[model], [Row(PROMPT, PROMPT)] * 128, RATES, storage(name)).seconds
    share = floor / times["median"]
    print(f"  {name} prefill 128 x {PROMPT}: {times['median']:.3f} s, floor {floor:.3f}, {share:.1%}", flush=True)
    return {"prompts": 128, "tokens": PROMPT, "seconds": times, "floor_s": floor, "of_floor": share}


def trace(llm: LLM, name: str, batch: int) -> dict[str, Any]:
    """Trace a decode step's time, kernel by kernel."""
    found = traced_steps(llm, prompts(batch, 1), False)
    for kernel, microseconds in list(found["microseconds_a_step"].items())[:8]:
        print(f"    {name} batch {batch}: {microseconds:9.1f} us  {kernel[:80]}", flush=True)
    return found


def measure(name: str, options: argparse.Namespace, kept: Kept) -> None:
    """Measure all of one format."""
    started = time.perf_counter()
    if name in FILES:
        hold_in_blocks(FILES[name], options.model)
    llm = engine(options.model, **FORMATS[name])
    print(f"{name}: {llm.kernels}, built in {time.perf_counter() - started:.1f} s", flush=True)
    decode_steps(llm, prompts(16, 99), 8, 32)  # warm
    for batch in options.batches:
        kept.attempt(
            f"decode {name} {batch}", lambda b=batch: decode(llm, name, options.model, b, options.steps, options.runs)
        )
    if options.prefill:
        kept.attempt(f"prefill {name}", lambda: prefill(llm, name, options.model, options.runs))
    if options.throughput:
        kept.attempt(f"throughput {name}", lambda: throughput(llm, name, options.model))
    for batch in options.traces:
        kept.attempt(f"trace {name} {batch}", lambda b=batch: trace(llm, name, b))


def product_seconds(call: Any, repeats: int = 20) -> float:
    """Measure the seconds of a call, the median of graphs of ``repeats`` calls, each of another copy."""
    call(0)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        with torch.cuda.graph(graph, stream=stream):
            for turn in range(repeats):
                call(turn)
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return sorted(times)[3]


def products(names: list[str], rows: list[int]) -> dict[str, Any]:
    """Measure the microseconds of the products of each matrix of a layer, on copies of it that do not fit into the
    cache."""
    device, found = torch.device("cuda"), {}
    ops = resolve_ops(device)
    for matrix, (outputs, inputs) in SHAPES.items():
        for name in names:
            kinds = kinds_for(FORMATS[name].get("quantization"), device) or (lambda _: None)
            kind = kinds(f"x.{matrix}")
            if kind is None:
                from transect.models.weights.dense import Dense as kind  # type: ignore[no-redef]
            copies = max(2, int(150e6 // (outputs * inputs)))
            weights = [kind(outputs, inputs, ops=ops, device=device, dtype=torch.bfloat16) for _ in range(copies)]
            for weight in weights:
                for tensor in (*weight.parameters(), *weight.buffers()):
                    (tensor.data.normal_(0, 0.02) if tensor.is_floating_point() else tensor.data.random_(0, 100))
            calls = [weight.requires_grad_(False).product() for weight in weights]
            bits = weights[0].format.bits
            for count in rows:
                x = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
                seconds = product_seconds(lambda turn, x=x, calls=calls: calls[turn % len(calls)](x))
                moved = outputs * inputs * bits / 8 + 2 * count * (inputs + outputs)
                floor = max(moved / RATES.bytes_per_second, 2 * count * outputs * inputs / RATES.flops_per_second)
                found[f"{matrix} {name} {count}"] = {"seconds": seconds, "floor_s": floor, "of_floor": floor / seconds}
                print(
                    f"  {matrix:8} {name:5} {count:5} rows: {seconds * 1e6:8.1f} us, {floor / seconds:.0%}", flush=True
                )
            del weights, calls
            release()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*FORMATS, "products"])
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(PRESETS))
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8, 64, 256])
    parser.add_argument(
        "--rows", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8, 64, 256, 2048]
    )
    parser.add_argument("--formats", default="bf16,fp8,int8,int4", help="of the products")
    parser.add_argument("--traces", type=lambda text: [int(each) for each in text.split(",") if each], default=[1])
    parser.add_argument("--steps", type=int, default=255)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "formats.json")
    options = parser.parse_args()
    kept = Kept(options.out)
    for part in options.parts:
        if part == "products":
            kept.attempt("products", lambda: products(options.formats.split(","), options.rows))
        else:
            measure(part, options, kept)
            release()


if __name__ == "__main__":
    main()
