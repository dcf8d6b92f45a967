"""Serving in 4 bits beside bfloat16, one engine after the other, and what it does to a model's predictions.

    python benchmarks/engine/int4_serving.py [--model llama-3.1-8b] [--batches 1,8,64] [--runs 3] [--quality
    smollm2-135m]

Decode: random weights of a true shape, prompts of 512 tokens, 256 steps, so 640 tokens of context on average; wall time
of a step as the caller of ``LLM.step`` sees it. Floors as in ``transect.costs.floors``, with the rates of
``engine/gpu.py`` and the bits that each engine's weights take. For each engine also where the time of a step of one
sequence goes, kernel by kernel. Quality: perplexity of a fixed text by the model's own weights, by its weights in 4
bits on the GPU, and by the values that these stand for on plain torch in float32, with the text that each continues
greedily; left out where the model is not there. Two minutes on an H200.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import RATES, STEPS, engine, prompts, release
from benchmarks.engine.step_trace import traced_steps
from transect.bench.offline import decode_steps
from transect.costs.floors import step_floor
from transect.costs.model import Row, weight_bytes
from transect.costs.storage import storage_for
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.spec.shapes import PRESETS
from transect.train.evaluation.perplexity import score_tokens

TEXT = (
    "The Amazon is the largest river of the world by the water that it carries. It begins high in the mountains "
    "of Peru and flows through the forest to the east, until it reaches the Atlantic Ocean. Many kinds of fish, "
    "birds and plants live on its banks, and most of them are found nowhere else. For a long time nobody knew "
    "where it began. People who lived on its shores had names for each of its arms, and traders who came later "
    "drew maps that did not agree. Today satellites measure its level every few days, and scientists compare what "
    "they see with the rain that has fallen. When the water rises, whole forests stand in it for months, and fish "
    "swim between the trees to eat their fruit."
)
BEGINNINGS = ("The capital of France is", "Once upon a time there was a", "Water boils at")


def decode(model: str, quantization: str | None, batches: list[int], runs: int) -> dict[str, Any]:
    """Measure the seconds of a step by batch, beside the floor, and the kernels of a step of one sequence."""
    llm = engine(model, quantization=quantization)
    name = quantization or "bfloat16"
    print(f"{name}: {llm.kernels}", flush=True)
    config, storage = PRESETS[model], storage_for(2, quantization)
    decode_steps(llm, prompts(16, 99), 8, 4)  # warm
    rows = []
    for batch in batches:
        spare = -(-batch * 512 // 8192) + 2
        found = [decode_steps(llm, prompts(batch, seed), STEPS, spare) for seed in range(runs)]
        floor = step_floor(config, [Row(1, length) for length in found[0].middle], RATES, storage).seconds
        times = record.summary([each.per_token for each in found])
        share = floor / times["median"]
        print(f"  batch {batch}: {times['median'] * 1e3:.3f} ms, floor {floor * 1e3:.3f}, {share:.1%}", flush=True)
        rows.append({"batch": batch, "step_s": times, "floor_s": floor, "of_floor": share})
    trace = traced_steps(llm, prompts(1, 1), False)
    for kernel, microseconds in trace["microseconds_a_step"].items():
        print(f"    {microseconds:9.1f} us  {kernel[:90]}")
    del llm
    release()
    return {"weight_bytes": weight_bytes(config, storage), "decode": rows, "trace": trace}


def quality(model: str) -> dict[str, Any]:
    """Measure perplexity and greedy text: weights as they are, in 4 bits, and as the values of the 4-bit codes."""
    ways: dict[str, dict[str, Any]] = {
        "as in the file": {},
        "int4": {"quantization": "int4"},
        "dequantized": {"quantization": "int4", "device": "cpu", "native": False, "dtype": "float32"},
    }
    found: dict[str, Any] = {"model": model}
    for name, settings in ways.items():
        llm = LLM(model, max_model_len=1024, max_num_seqs=4, enable_prefix_caching=False, **settings)
        tokens = llm.tokenizer.encode(TEXT, add_special_tokens=True)
        score = score_tokens(llm, tokens, len(TEXT), window=len(tokens), stride=len(tokens) // 2)
        outputs = llm.generate(list(BEGINNINGS), SamplingParams(temperature=0.0, max_tokens=24))
        texts = [begin + output.outputs[0].text for begin, output in zip(BEGINNINGS, outputs, strict=True)]
        found[name] = {"kernels": llm.kernels, "perplexity": score.perplexity, "tokens": score.predicted, "text": texts}
        print(f"{name}: perplexity {score.perplexity:.3f} of {score.predicted} tokens; {texts}", flush=True)
        del llm
        release()
    found["of_dequantized"] = found["int4"]["perplexity"] / found["dequantized"]["perplexity"]
    print(f"int4 has {found['of_dequantized']:.4f} times the perplexity of its dequantized weights", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(PRESETS))
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quality", default="smollm2-135m", help="A model with weights and a tokenizer; empty: none.")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "int4_serving.json")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    environment = {**record.environment(("torch", "triton")), "rates": RATES.device}
    if torch.cuda.is_available():
        environment["gpu"] = torch.cuda.get_device_name()
    result: dict[str, Any] = {"environment": environment, "model": options.model}
    for name, quantization in (("bfloat16", None), ("int4", "int4")):
        result[name] = decode(options.model, quantization, batches, options.runs)
        record.write(options.out, result)
    pairs = zip(result["bfloat16"]["decode"], result["int4"]["decode"], strict=True)
    result["speedup"] = {str(a["batch"]): a["step_s"]["median"] / b["step_s"]["median"] for a, b in pairs}
    print("tokens/s of int4 over bfloat16: " + ", ".join(f"batch {b}: {s:.2f}" for b, s in result["speedup"].items()))
    if options.quality:
        try:
            result["quality"] = quality(options.quality)
        except (ValueError, OSError):
            traceback.print_exc()
    record.write(options.out, result)


if __name__ == "__main__":
    main()
