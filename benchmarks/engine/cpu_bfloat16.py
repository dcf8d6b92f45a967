"""Products with inputs in bfloat16 on a CPU: their error, what a model's outputs lose, and the gain of one product.

    python benchmarks/engine/cpu_bfloat16.py [--model smollm2-135m] [--characters 24000] [--out FILE]

Takes about 2 minutes on two cores. The error is that of a product of random inputs and 4-bit weights (Q4_0) against
float64, beside an estimate of 8-bit inputs in blocks of 32 with a scale each, as llama.cpp has them. The model predicts
a text (``benchmarks/formats/quality.py``) with inputs in float32 and in bfloat16: perplexity, the KL divergence of its
distributions, and positions where the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.formats.quality import WINDOW, texts
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.formats.ggml_quantize import quantize
from transect.models.context import VarlenContext
from transect.models.decoder import Decoder
from transect.ops.cpu.library import Library, PackedWeight, load
from transect.ops.cpu.packing import pack
from transect.text.tokenizer import Tokenizer

SHAPES = ((576, 576), (2560, 2560), (9728, 2560))
ROWS = (1, 4, 16, 256)
REPEATS = 9
BYTES_BETWEEN = 64 * 2**20
"""Weights that are read between two uses of the same ones: more than a cache holds."""


def errors(libraries: dict[str, Library]) -> dict[str, dict[str, float]]:
    """Measure the error of a product of 2560 columns against float64: root mean square, and the largest, both relative
    to the root mean square of the outputs."""
    generator = torch.Generator().manual_seed(0)
    x, dense = torch.randn(64, 2560, generator=generator), torch.randn(512, 2560, generator=generator) / 50
    blocks = quantize(dense.numpy(), "Q4_0")
    exact = x.double() @ torch.from_numpy(blocks.dequantize()).double().T
    made = {name: library.linear(x, pack(library, blocks)).double() for name, library in libraries.items()}
    scale = x.view(64, -1, 32).abs().amax(-1, keepdim=True).double() / 127
    rounded = ((x.view(64, -1, 32) / scale).round() * scale).view(64, -1)
    made["int8"] = rounded @ torch.from_numpy(blocks.dequantize()).double().T
    size = exact.square().mean().sqrt()
    return {
        name: {
            "rms": float((found - exact).square().mean().sqrt() / size),
            "largest": float((found - exact).abs().max() / size),
        }
        for name, found in made.items()
    }


def products(libraries: dict[str, Library]) -> list[dict[str, Any]]:
    """Time one product of 4-bit weights, which come from memory, in turns."""
    rows: list[dict[str, Any]] = []
    for n, k in SHAPES:
        blocks = quantize(np.random.default_rng(0).standard_normal((n, k)).astype(np.float32), "Q4_0")
        first = pack(libraries["float32"], blocks)
        copies = max(1, -(-BYTES_BETWEEN // first.data.numel()))
        weights = [first, *(PackedWeight(first.kind, n, k, first.data.clone()) for _ in range(copies - 1))]
        for count in ROWS:
            x = torch.randn(count, k)
            seconds: dict[str, list[float]] = {name: [] for name in libraries}
            for _ in range(REPEATS):
                for name, library in libraries.items():
                    begun = time.perf_counter()
                    for weight in weights:
                        library.linear(x, weight)
                    seconds[name].append((time.perf_counter() - begun) / copies)
            found = {name: record.summary(values) for name, values in seconds.items()}
            rows.append({"n": n, "k": k, "rows": count, "seconds": found})
    return rows


@torch.inference_mode()
def log_probabilities(model: Decoder, window: list[int]) -> Tensor:
    """Predict every token of a window but the first: the log-softmax over the vocabulary at each."""
    context = VarlenContext(torch.tensor([0, len(window)], dtype=torch.int32), model.ops)
    hidden = model(torch.tensor(window), context.positions(), context)
    return torch.log_softmax(model.logits(hidden)[:-1].float(), -1)


def outputs(name: str, characters: int, threads: int) -> dict[str, Any]:
    """Compare a model's predictions with inputs in bfloat16 with those in float32."""
    source = resolve(name)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Tokenizer.from_source(source).encode(texts(Path(folder), characters)[1].read_text())
    dtypes = {"float32": "auto", "bfloat16": "bfloat16"}
    models = {key: load_model(source, dtype=dtype, native=True, threads=threads) for key, dtype in dtypes.items()}
    divergences, losses, same = [], dict.fromkeys(models, 0.0), 0
    for at in range(0, len(tokens) - WINDOW + 1, WINDOW):
        window = tokens[at : at + WINDOW]
        found = {key: log_probabilities(model, window) for key, model in models.items()}
        one, other = found["float32"], found["bfloat16"]
        divergences.append((one.exp() * (one - other)).sum(-1))
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
        for key, each in found.items():
            losses[key] -= float(each.gather(1, torch.tensor(window[1:])[:, None]).double().sum())
    all_of = torch.cat(divergences)
    count = len(all_of)
    return {
        "tokens": count,
        "perplexity": {key: math.exp(loss / count) for key, loss in losses.items()},
        "kl_mean": float(all_of.mean()),
        "kl_p99": float(all_of.quantile(0.99)),
        "same_likeliest": same / count,
    }


def table(result: dict[str, Any]) -> str:
    """Format errors, outputs and times."""
    error, out = result["errors"], result["outputs"]
    lines = ["| inputs of a product | error, root mean square | largest |", "|---|---|---|"]
    names = {"float32": "float32", "bfloat16": "bfloat16", "int8": "8 bits in blocks of 32 (estimate)"}
    lines += [f"| {names[name]} | {each['rms']:.1e} | {each['largest']:.1e} |" for name, each in error.items()]
    perplexity = out["perplexity"]
    lines += [
        "",
        f"{result['model']} on {out['tokens']:,} tokens: perplexity {perplexity['float32']:.3f} with inputs in float32 "
        f"and {perplexity['bfloat16']:.3f} in bfloat16; KL divergence {out['kl_mean']:.1e} (99th percentile "
        f"{out['kl_p99']:.1e}); the likeliest token is the same at {out['same_likeliest']:.1%} of positions.",
        "",
        "| matrix (Q4_0) | rows | float32, µs | bfloat16, µs | gain |",
        "|---|---|---|---|---|",
    ]
    for row in result["products"]:
        one, other = (row["seconds"][name]["median"] * 1e6 for name in ("float32", "bfloat16"))
        lines.append(f"| {row['n']} x {row['k']} | {row['rows']} | {one:,.0f} | {other:,.0f} | {one / other:.2f}x |")
    machine = result["environment"]
    lines += [
        "",
        f"`{result['command']}` on {result['threads']} cores of an {machine['processor']}, "
        f"{record.made_at([machine])}, medians of {REPEATS} rounds in turns.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--characters", type=int, default=24000)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "cpu_bfloat16.json")
    options = parser.parse_args()
    libraries = {name: load(options.threads, bfloat16=name == "bfloat16") for name in ("float32", "bfloat16")}
    if not libraries["bfloat16"].bfloat16:
        raise SystemExit("this processor has no AVX512-BF16")
    result = {
        "command": record.command("benchmarks/engine/cpu_bfloat16.py"),
        "environment": record.environment(("torch", "numpy")),
        "threads": options.threads,
        "model": options.model,
        "errors": errors(libraries),
        "outputs": outputs(options.model, options.characters, options.threads),
        "products": products(libraries),
    }
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
