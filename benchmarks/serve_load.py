"""A server with its default settings under requests that come one by one: what their senders feel, and why.

    python benchmarks/serve_load.py [--rates 8,24,40,inf] [--seeds 0] [--requests 400] [--shape FOLDER_OR_PRESET]

Random weights of a model's shape, a vocabulary of made-up words (each is one token, so text of any length can be made
and every token has text), no prefix cache. Requests of 600 tokens in and 150 out, each of them 60% more or less, arrive
at random (Poisson). Beside the table stand vLLM's figures for the same work, measured apart.

The engine's decision log tells why tokens came late: for every gap between two steps how long was planned, launched,
waited for the device, and what had been predicted (``step_timeline.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
from step_timeline import timeline
from transect.bench.lengths import Lengths
from transect.bench.levels import Level, WorkSource, rate_levels, run_levels
from transect.bench.target import Target, served_model

PROMPT, OUTPUT = Lengths.parse("uniform:240-960"), Lengths.parse("uniform:60-240")
WARM_UP = 4
"""Requests before those that count: connections, and nothing else that a server's first requests would meet."""
VLLM = {
    "8": {"output_tokens_per_second": 1172, "ttft": (34, 64), "tpot": (5.57, 6.42), "itl": 17.4, "e2e": (848, 1409)},
    "24": {
        "output_tokens_per_second": 3321,
        "ttft": (47, 113),
        "tpot": (7.91, 10.03),
        "itl": 30.1,
        "e2e": (1218, 2056),
    },
    "inf": {
        "output_tokens_per_second": 6367,
        "ttft": (3407, 6115),
        "tpot": (36.4, 95.8),
        "itl": 209,
        "e2e": (8823, 9317),
    },
}
"""vLLM 0.24 on an H200 of the kind, with the same work from a load generator of others: measured apart, milliseconds;
pairs are p50 and p99, ``itl`` is p99."""
COUNTERS = ("late_captures", "late_compilations", "timed_steps", "step_seconds", "predicted_step_seconds")


def model_folder(shape: str, folder: Path) -> Path:
    """A folder with ``config.json`` of a shape and a vocabulary of as many words as it has tokens.

    Args:
        shape: a folder with a ``config.json``, or the name of a preset.
        folder: where to make it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if Path(shape).is_dir():
        config = json.loads((Path(shape) / "config.json").read_text())
    else:
        from transect.models.config_hf import to_hf
        from transect.models.presets import PRESETS

        config = to_hf(PRESETS[shape])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {word(number): number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": word(0)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def word(number: int) -> str:
    """The text of a token; a space comes before it."""
    return f"\N{LOWER ONE EIGHTH BLOCK}w{number}"


@contextmanager
def server(model: Path, log: Path, extra: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """``transect serve`` for the length of the block; its URL, and the seconds until it was ready."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "transect", "serve", str(model), "--port", "0", "--load-format", "dummy"]
    command += ["--no-prefix-caching", "--max-queue", "1024", "--decision-log", str(log), *extra]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " ready on " not in line:
                raise RuntimeError(f"the server did not start: {line}")
            print(line.strip(), flush=True)
            yield line.split(" ready on ")[1].split()[0], time.perf_counter() - start
        finally:
            process.terminate()


def levels(rates: Sequence[float], requests: int, seed: int, highest: int) -> list[Level]:
    """The work of one seed, as text."""
    found = rate_levels(WorkSource(PROMPT, OUTPUT, highest_id=highest, seed=seed), requests, rates)
    return [replace(level, work=[replace(each, prompt=text(each.prompt)) for each in level.work]) for level in found]


def text(prompt: tuple[int, ...] | str) -> str:
    """A prompt of token ids as text."""
    return prompt if isinstance(prompt, str) else "".join(f" {word(number)[1:]}" for number in prompt)


def counters(url: str) -> dict[str, float]:
    """Counters of the engine, by name without their prefix; those that the server has."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        plain = name.split("{")[0].removeprefix("transect_").removesuffix("_total")
        if plain in COUNTERS:
            found[plain] = float(value)
    return found


async def run(url: str, level: Level) -> dict[str, Any]:
    """One level of load: its summary, with the times of its beginning and end on the system's monotonic clock."""
    target = Target(url, await served_model(url))
    warm = [replace(each, output_tokens=8) for each in level.work[:WARM_UP]]
    before, began = counters(url), time.monotonic()
    (result,) = await run_levels(target, [level], warm_up=warm)
    after = counters(url)
    changed = {name: after[name] - before[name] for name in after}
    return {**result.summary, "counters": changed, "began": began, "ended": time.monotonic()}


def row(rate: str, name: str, level: dict[str, Any]) -> str:
    """A line of the table, milliseconds."""

    def ms(what: str, share: str) -> str:
        return "-" if level[what] is None else f"{level[what][share] * 1e3:.2f}"

    times = [ms(*each.split()) for each in ("ttft p50", "ttft p99", "tpot p50", "tpot p99", "itl p99")]
    times += [ms("e2e", "p50"), ms("e2e", "p99")]
    return f"| {rate} | {name} | {level['output_tokens_per_second']:.0f} | " + " | ".join(times) + " |"


def vllm_row(rate: str) -> str | None:
    """vLLM's line, where there is one."""
    found = VLLM.get(rate)
    if found is None:
        return None
    times: list[Any] = [*found["ttft"], *found["tpot"], found["itl"], *found["e2e"]]  # type: ignore[misc]
    return f"| {rate} | vLLM 0.24 (apart) | {found['output_tokens_per_second']} | " + " | ".join(map(str, times)) + " |"


def table(result: dict[str, Any]) -> str:
    """For people: a line for each rate and seed, and vLLM's below."""
    lines = [
        "| rate | server | out tok/s | TTFT p50 | p99 | TPOT p50 | p99 | ITL p99 | E2E p50 | p99 |",
        "|---" * 10 + "|",
    ]
    rates = sorted({each["rate"] for each in result["levels"]}, key=float)
    for rate in rates:
        lines += [row(rate, f"Transect, seed {e['seed']}", e["result"]) for e in result["levels"] if e["rate"] == rate]
        lines += [line for line in [vllm_row(rate)] if line]
    return "\n".join(lines)


CAUSES = {
    "take": "the device itself, and messages meanwhile",
    "device": "the device itself",
    "launch": "launching: captures, kernels one by one",
    "plan": "planning",
    "commit": "taking tokens in",
}
"""What the parts of a gap between two steps mean (``step_timeline.py``)."""


def page(result: dict[str, Any]) -> str:
    """For a page: the table, what made the latest 1% of tokens late, and how good predictions were."""
    lines = [table(result), ""]
    lines += ["| rate | gap p99 | " + " | ".join(CAUSES.values()) + " | late captures | predicted / measured |"]
    lines += ["|---" * (4 + len(CAUSES)) + "|"]
    for each in sorted(result["levels"], key=lambda level: float(level["rate"])):
        found, counts = each["timeline"], each["result"]["counters"]
        shares = " | ".join(f"{found['causes']['shares'][part]:.0%}" for part in CAUSES)
        late = f"{counts['late_captures']:.0f}" if "late_captures" in counts else "not counted"
        ratio = counts["predicted_step_seconds"] / counts["step_seconds"]
        lines.append(f"| {each['rate']} | {found['p99'] * 1e3:.1f} ms | {shares} | {late} | {ratio:.2f} |")
    machine = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines.append(
        f"\n`{result['command']}` on one NVIDIA H200, {result['shape']}, {result['work']['requests']} requests, "
        f"{versions}, {record.made_at([machine])}; ready after {result['ready_s']:.0f} s.\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="8,24,40,inf", help="requests per second; inf: all at once")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a preset, or a folder with a config.json")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further level begins")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "serve_load.json")
    parser.add_argument("options", nargs="*", help="further options of transect serve, after --")
    options = parser.parse_args()
    began = time.perf_counter()
    rates = [float(each) for each in options.rates.split(",")]
    result: dict[str, Any] = {
        "command": "python benchmarks/serve_load.py",
        "environment": record.environment(("torch", "triton")),
        "shape": options.shape,
        "options": options.options,
        "generator": "transect bench serve",
        "work": {"requests": options.requests, "prompt": str(PROMPT), "output": str(OUTPUT)},
        "levels": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(options.shape, Path(name) / "model")
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        log = Path(name) / "decisions.log"
        try:
            with server(folder, log, options.options) as (url, ready_s):
                result["ready_s"] = ready_s
                for seed in map(int, options.seeds.split(",")):
                    for rate in rates:
                        if time.perf_counter() - began > options.limit:
                            continue
                        (level,) = levels([rate], options.requests, seed, vocab - 1)
                        summary = asyncio.run(run(url, level))
                        result["levels"].append({"rate": f"{rate:g}", "seed": seed, "result": summary})
                        print(row(f"{rate:g}", f"seed {seed}", summary), summary["counters"], flush=True)
                        record.write(options.out, result)
        except Exception:
            traceback.print_exc()
        if log.exists():
            for each in result["levels"]:
                summary = each["result"]
                each["timeline"] = timeline(log, summary["began"], summary["ended"])
        record.write(options.out, result)
    print(table(result))
    for each in result["levels"]:
        print(f"rate {each['rate']}, seed {each['seed']}: {json.dumps(each.get('timeline', {}).get('causes'))}")


if __name__ == "__main__":
    main()
