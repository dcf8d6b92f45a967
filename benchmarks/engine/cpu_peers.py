"""Engines on a CPU, each in its best setting, in one run: decode of one stream and of 16, as shares of the floor.

    python benchmarks/engine/cpu_peers.py [--rounds 3] [--threads 2] [--model smollm2-135m] [--works decode,batch]
    python benchmarks/engine/cpu_peers.py --shapes 1.7b,4b,mixture --rounds 1 --repeats 1 --settings 1

Transect, llama.cpp, ik_llama.cpp, OpenVINO GenAI and ONNX Runtime GenAI, each by the interpreter that has its packages:

    for each in llamacpp ik_llamacpp openvino_genai onnxruntime_genai; do python -m venv /tmp/peers/$each; done
    /tmp/peers/llamacpp/bin/pip install llama-cpp-python
    /tmp/peers/ik_llamacpp/bin/pip install ik-llama-cpp-python
    /tmp/peers/openvino_genai/bin/pip install openvino-genai
    /tmp/peers/onnxruntime_genai/bin/pip install onnxruntime-genai onnx-ir torch transformers safetensors gguf

All but ONNX Runtime read the same GGUF file; for that one the file is written as a Hugging Face folder and rounded to 4
bits in blocks of 32 by its own builder. Every entry of ``SETTINGS`` is tried once, and the best one of each
work runs in the rounds. ``--shapes`` writes files of random 4-bit weights (Q4_0) of larger models first. An engine that
cannot be had or cannot read a file is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine import random_gguf
from benchmarks.engine.cpu_vs_llamacpp import floors
from benchmarks.engine.cpu_work import SHORT, WORK

HERE = Path(__file__).parent
ENGINES = {
    "transect": "Transect",
    "llamacpp": "llama.cpp",
    "ik_llamacpp": "ik_llama.cpp",
    "openvino_genai": "OpenVINO GenAI",
    "onnxruntime_genai": "ONNX Runtime GenAI",
}
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "transect": ({"dtype": "bfloat16"}, {}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
    "llamacpp": (
        {"flash_attn_type": 0, "kv_unified": False},
        {"flash_attn_type": 1, "kv_unified": False},
        {"flash_attn_type": 1, "kv_unified": True},
    ),
    "ik_llamacpp": (
        {"flash_attn": True, "repack_tensors": True},
        {"flash_attn": True, "repack_tensors": False},
        {"flash_attn": False, "repack_tensors": True},
        {"flash_attn": False, "repack_tensors": False},
    ),
    "openvino_genai": (
        {"PERFORMANCE_HINT": "LATENCY"},
        {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"},
    ),
    "onnxruntime_genai": ({},),
}
"""Settings to try. ``kv_cache_dtype``: K and V of 8 bits. ``dtype``: inputs of products in bfloat16.
``repack_tensors``: rows of weights are interleaved when the file is read. With ``flash_attn`` ik_llama.cpp ends at an
assertion (``S > 0``) when several sequences are short, such as two of 16 tokens; the next setting is tried then.
OpenVINO's first one computes in bfloat16 where the processor can, with K and V of 8 bits."""


def measure(engine: str, path: Path, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine in its own process: medians of the works, or ``failed`` with the last line of its errors."""
    python = sys.executable if engine == "transect" else str(options.environments / engine / "bin" / "python")
    command = [python, str(HERE / "cpu_work.py"), engine, str(path), "--threads", str(options.threads)]
    command += ["--settings", json.dumps(settings), "--works", options.works, "--repeats", str(options.repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=options.timeout)
    except FileNotFoundError:
        return {"failed": f"there is no {python}"}
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {options.timeout:.0f} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"ended with {done.returncode}"]
        return {"failed": said[-1].strip()[:200]}
    result = json.loads(done.stdout.splitlines()[-1])
    result["medians"] = {work: statistics.median(values) for work, values in result["rates"].items()}
    return result


def for_onnx(path: Path, folder: Path, options: argparse.Namespace) -> Path:
    """Write a GGUF file as ONNX Runtime GenAI reads it; returns a folder, which is empty if that fails."""
    python = str(options.environments / "onnxruntime_genai" / "bin" / "python")
    out, plain = folder / "onnx", folder / "plain"
    call = "import sys; sys.path[:0] = sys.argv[3:]; from pathlib import Path; from benchmarks.peers import "
    call += "onnxruntime_genai as o; o.hugging_face_folder(Path(sys.argv[1]), Path(sys.argv[2]))"
    build = [python, "-m", "onnxruntime_genai.models.builder", "-m", path.stem, "-i", str(plain), "-o", str(out)]
    build += ["-p", "int4", "-e", "cpu", "-c", str(folder / "cache")]
    build += ["--extra_options", "hf_token=false", "int4_accuracy_level=4"]
    for command in ([python, "-c", call, str(path), str(plain), str(record.ROOT)], build):
        try:
            subprocess.run(command, capture_output=True, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        except FileNotFoundError:
            break
    out.mkdir(exist_ok=True)
    return out


def race(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Try all settings once, then run the best ones of each engine in turns."""
    works = options.works.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        onnx = for_onnx(path, Path(scratch), options) if "onnxruntime_genai" in options.engines else path
        paths = {engine: onnx if engine == "onnxruntime_genai" else path for engine in options.engines}
        engines: dict[str, dict[str, Any]] = {}
        for engine, file in paths.items():
            tried, right = [], []
            for settings in SETTINGS[engine]:
                if len(right) < options.settings:
                    tried.append((settings, measure(engine, file, settings, options)))
                    right += [tried[-1]] if "medians" in tried[-1][1] else []
            if not right:
                engines[engine] = tried[0][1]
                print(engine, tried[0][1], file=sys.stderr, flush=True)
                continue
            best = {work: max(right, key=lambda each: each[1]["medians"][work])[0] for work in works}
            all_tried = {json.dumps(settings): found["medians"] for settings, found in right}
            engines[engine] = {"best": best, "tried": all_tried, "versions": right[0][1]["versions"]}
            engines[engine] |= {"kernels": right[0][1]["kernels"]} if "kernels" in right[0][1] else {}
            print(engine, all_tried, file=sys.stderr, flush=True)
        rounds: dict[str, dict[str, list[float]]] = {}
        for _ in range(options.rounds):
            for engine, found in engines.items():
                settings = [each for n, each in enumerate(found.get("best", {}).values()) if n == _first(found, n)]
                seen = [(each, measure(engine, paths[engine], each, options)) for each in settings]
                for work in works if seen else ():
                    rate = max(r["medians"][work] for s, r in seen if s == found["best"][work] and "medians" in r)
                    rounds.setdefault(engine, {}).setdefault(work, []).append(rate)
    for engine, rates in rounds.items():
        engines[engine]["work"] = {work: record.summary(values) for work, values in rates.items()}
    bounds = floors(str(path), options.threads, {work: (WORK | SHORT)[work] for work in works})
    return {"engines": engines, "floor": {work: bounds[work] for work in works}, "bytes": path.stat().st_size}


def _first(found: dict[str, Any], index: int) -> int:
    """Return the first work that has the settings of the work with this number."""
    chosen = list(found["best"].values())
    return chosen.index(chosen[index])


def table(result: dict[str, Any]) -> str:
    """Format tokens per second and shares of the floor, by model and engine."""
    works = next(iter(result["models"].values()))["floor"]
    names = {"decode": "one stream", "batch": "16 streams", "prefill": "prompt of 512"}
    names |= {"decode-short": "one stream", "batch-short": "16 streams"}
    head = " | ".join(f"{names[work]}, tok/s | of floor" for work in works)
    lines = [f"| model | engine | {head} |", "|---|---|" + "---|---|" * len(works)]
    notes: dict[str, None] = {}
    versions: dict[str, str] = {}
    for model, found in result["models"].items():
        for engine, each in found["engines"].items():
            if "work" not in each:
                notes[f"{ENGINES[engine]}, {model}: {each.get('failed', 'no round')}"] = None
                continue
            versions |= each["versions"]
            cells = []
            for work, floor in found["floor"].items():
                rate = each["work"][work]
                low, middle, high = (_rounded(rate[key]) for key in ("min", "median", "max"))
                spread = f" ({low} to {high})" if rate["runs"] > 1 else ""
                cells.append(f"{middle}{spread} | {rate['median'] / floor:.0%}")
            lines.append(f"| {model} | {ENGINES[engine]} | {' | '.join(cells)} |")
    lines += ["", *(f"* {note}" for note in notes), ""] if notes else [""]
    machine = result["environment"]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    rounds = "one round" if result["rounds"] == 1 else f"medians of {result['rounds']} rounds in turns"
    lines.append(
        f"`{result['command']}` on {result['threads']} cores of an {machine['processor']}, {told}, "
        f"{record.made_at([machine])}, {rounds}."
    )
    return "\n".join(lines) + "\n"


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="of each work in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shapes", help=f"instead of --model: {', '.join(random_gguf.SHAPES)}")
    parser.add_argument("--works", help="default: decode,batch; of shapes decode-short,batch-short")
    parser.add_argument("--settings", type=int, default=9, help="settings of an engine to try that work")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--environments", type=Path, default=Path("/tmp/peers"), help="folder of virtual environments")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one engine's process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    options.works = options.works or ("decode-short,batch-short" if options.shapes else "decode,batch")
    name = "cpu_peers_shapes.json" if options.shapes else "cpu_peers.json"
    result: dict[str, Any] = {
        "command": record.command("benchmarks/engine/cpu_peers.py"),
        "environment": record.environment(("torch",)),
        "threads": options.threads,
        "rounds": options.rounds,
        "models": {},
    }
    from transect.checkpoints.resolve import resolve

    with tempfile.TemporaryDirectory() as folder:
        for model in (options.shapes or options.model).split(","):
            path = random_gguf.write(model, Path(folder)) if options.shapes else Path(resolve(model).path)
            result["models"][model] = race(path, options)
            record.write(options.out or record.RESULTS / "cpu" / name, result)
            if options.shapes:
                path.unlink()
    print(table(result))


if __name__ == "__main__":
    main()
