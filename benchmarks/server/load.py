"""A server with its default settings under requests that come one by one: what their senders feel, and why.

    python benchmarks/server/load.py [--rates 8,24,40,inf] [--seeds 0,1,2] [--requests 400]
        [--shape FOLDER_OR_PRESET] [--generator transect|sglang] [--work random|prefixes,chats,short,long]
    python benchmarks/server/load.py --merge FILE FILE ... --out FILE

Random weights of a model's shape, a vocabulary of made-up words (each is one token, so text of any length can be made
and every token has text), no prefix cache. Requests of 600 tokens in and 150 out, each of them 60% more or less, arrive
at random (Poisson), from this project's generator or from one of others (``server/generators.py``). Beside the table
stand vLLM's figures for the same work, measured apart. Other work, with the prefix cache: prompts that begin alike,
chats of several turns (``server/chats.py``), prompts of one token, whose TTFT is what a request takes on its way, and
long prompts among short ones (``server/long_among_short.py``).

The engine's decision log tells why tokens came late: for every gap between two steps how long was planned, launched,
waited for the device, and what had been predicted (``server/step_timeline.py``); and where the time to each
request's first token went (``server/request_stages.py``). ``--merge`` makes one table of several results: other
rates, other seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.peers import vllm
from benchmarks.peers.peer import LoadGenerator
from benchmarks.peers.sglang_generator import SglangGenerator
from benchmarks.server.chats import TURNS, chats, run_chats
from benchmarks.server.generators import (
    GENERATORS,
    GROUPS,
    OUTPUT,
    PREFIX,
    PROMPT,
    QUESTION,
    own,
    own_level,
    text,
    word,
)
from benchmarks.server.long_among_short import LONG, of_short, with_long
from benchmarks.server.request_stages import STAGES, request_stages, stages_line
from benchmarks.server.step_timeline import timeline
from transect.bench.levels import Level, Result
from transect.bench.summary import summarize
from transect.bench.target import Target, served_model
from transect.explain.engine.log import load

WORKS = {
    "random": "",
    "prefixes": f", {GROUPS} prefixes of {PREFIX:,} tokens before {QUESTION} of their own",
    "chats": f", chats of {TURNS} turns",
    "short": ", prompts of one token",
    "long": f", a prompt of {LONG:,} tokens every second among them",
}
"""Kinds of work, and what a page says of them."""
FOUND, ASKED = "prefix_cache_hit_tokens", "prefix_cache_query_tokens"
COUNTERS = ("late_captures", "late_compilations", "timed_steps", "step_seconds", "predicted_step_seconds", FOUND, ASKED)


def model_folder(shape: str, folder: Path) -> Path:
    """Create a folder with ``config.json`` of a shape and a vocabulary of as many words as it has tokens.

    Args:
        shape: a folder with a ``config.json``, or the name of a preset.
        folder: where to make it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if Path(shape).is_dir():
        config = json.loads((Path(shape) / "config.json").read_text())
    else:
        from transect.spec.hf import to_hf
        from transect.spec.shapes import PRESETS

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


@contextmanager
def server(model: Path, log: Path, extra: Sequence[str] = (), *, caching: bool = False) -> Iterator[tuple[str, float]]:
    """Run ``transect serve`` for the length of the block; yields its URL, and the seconds until it was ready.
    ``caching``: with a prefix cache."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "transect", "serve", str(model), "--port", "0", "--load-format", "dummy"]
    command += [] if caching else ["--no-prefix-caching"]
    command += ["--max-queue", "1024", "--decision-log", str(log), *extra]
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


def counters(url: str) -> dict[str, float]:
    """Read the counters of the engine that the server has, by name without their prefix."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        plain = name.split("{")[0].removeprefix("transect_").removesuffix("_total")
        if plain in COUNTERS:
            found[plain] = float(value)
    return found


def run(
    url: str, others: LoadGenerator | None, work: str, folder: Path, rate: float, requests: int, seed: int
) -> tuple[dict[str, Any], Result | None]:
    """Run one level of load: its summary, with the times of its beginning and end on the system's monotonic clock, and
    its requests one by one, if the generator reports them. ``others``: another project's generator, or None
    for this project's."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    result = None
    before, began = counters(url), time.monotonic()
    if others is not None:
        summary = others.level(url, folder, rate, requests, seed, prefixes=work == "prefixes")
    elif work == "chats":
        held = chats(requests, rate, seed, [text([number]) for number in range(1, vocab)])
        found = asyncio.run(run_chats(Target(url, asyncio.run(served_model(url))), held))
        summary = summarize(found)
        result = Result(Level("requests/s", rate, []), summary, found.records, found.began)
    else:
        level = own_level(rate, requests, seed, vocab - 1, (1, 1) if work == "short" else PROMPT)
        if work == "long":
            level = with_long(level, seed, [text([number]) for number in range(1, vocab)])
        result = asyncio.run(own(url, level))
        result = of_short(result) if work == "long" else result
        summary = result.summary
    after = counters(url)
    changed = {name: after[name] - before[name] for name in after}
    return {**summary, "counters": changed, "began": began, "ended": time.monotonic()}, result


FIGURES = ("ttft p50", "ttft p99", "tpot p50", "tpot p99", "itl p99", "e2e p50", "e2e p99")


def figures(level: dict[str, Any]) -> list[float]:
    """Return tokens per second, then ``FIGURES`` in milliseconds."""
    times = [level[what][share] * 1e3 for what, share in (each.split() for each in FIGURES)]
    return [level["output_tokens_per_second"], *times]


def row(rate: str, name: str, found: Sequence[float]) -> str:
    """Format a line of the table."""
    return f"| {rate} | {name} | {found[0]:.0f} | " + " | ".join(f"{value:.2f}" for value in found[1:]) + " |"


def combined(levels: Sequence[dict[str, Any]], worst: bool) -> list[float]:
    """Return the median of several seeds' figures, or the worst of each."""
    each = list(zip(*(figures(level["result"]) for level in levels), strict=True))
    if worst:
        return [min(each[0]), *map(max, each[1:])]
    return [statistics.median(values) for values in each]


def vllm_row(rate: str) -> str | None:
    """Format vLLM's line, if there is one."""
    found = vllm.LOAD.get(rate)
    if found is None:
        return None
    times: list[Any] = [*found["ttft"], *found["tpot"], found["itl"], *found["e2e"]]  # type: ignore[misc]
    return f"| {rate} | vLLM 0.24 (apart) | {found['output_tokens_per_second']} | " + " | ".join(map(str, times)) + " |"


def table(result: dict[str, Any]) -> str:
    """Format a line for each rate and seed, and vLLM's below."""
    lines = [
        "| rate | server | out tok/s | TTFT p50 | p99 | TPOT p50 | p99 | ITL p99 | E2E p50 | p99 |",
        "|---" * 10 + "|",
    ]
    for rate in rates_of(result):
        mine = [each for each in result["levels"] if each["rate"] == rate]
        lines.append(
            row(rate, f"Transect, median of {len(mine)}" if len(mine) > 1 else "Transect", combined(mine, False))
        )
        if len(mine) > 1:
            lines.append(row(rate, "worst of these", combined(mine, True)))
        same = result.get("work", {}).get("kind", "random") == "random"
        lines += [line for line in [vllm_row(rate) if same else None] if line]
    return "\n".join(lines)


def rates_of(result: dict[str, Any]) -> list[str]:
    """List the rates that were measured, lowest first."""
    return sorted({each["rate"] for each in result["levels"]}, key=float)


def stages_table(result: dict[str, Any]) -> list[str]:
    """Format the stages of the time to the first token: medians over all seeds of p50 and p99, milliseconds."""
    levels = [each for each in result["levels"] if each.get("stages")]
    if not levels:
        return []
    lines = ["", "| rate | " + " | ".join(STAGES) + " | steps of a prompt |", "|---" * (2 + len(STAGES)) + "|"]
    for rate in rates_of(result):
        mine = [each["stages"] for each in levels if each["rate"] == rate]
        if not mine:
            continue

        def both(name: str, scale: float, mine: list[dict[str, Any]] = mine) -> str:
            shown = [statistics.median(each[name][share] for each in mine) * scale for share in ("p50", "p99")]
            return f"{shown[0]:.1f} / {shown[1]:.1f}"

        lines.append(f"| {rate} | " + " | ".join(both(name, 1e3) for name in STAGES) + f" | {both('steps', 1)} |")
    return lines


CAUSES = {
    "take": "the device itself, and messages meanwhile",
    "device": "the device itself",
    "launch": "launching: captures, kernels one by one",
    "plan": "planning",
    "commit": "taking tokens in",
}
"""Meanings of the parts of a gap between two steps (``server/step_timeline.py``)."""


def page(result: dict[str, Any]) -> str:
    """Format a page: the table, the causes of the latest 1% of tokens, and the accuracy of predictions."""
    lines = [table(result), ""]
    lines += ["| rate | gap p99 | " + " | ".join(CAUSES.values()) + " | late captures | predicted / measured |"]
    lines += ["|---" * (4 + len(CAUSES)) + "|"]
    for each in sorted(result["levels"], key=lambda level: (float(level["rate"]), level["seed"])):
        found, counts = each["timeline"], each["result"]["counters"]
        shares = " | ".join(f"{found['causes']['shares'][part]:.0%}" for part in CAUSES)
        late = f"{counts['late_captures']:.0f}" if "late_captures" in counts else "not counted"
        ratio = counts["predicted_step_seconds"] / counts["step_seconds"]
        lines.append(f"| {each['rate']} | {found['p99'] * 1e3:.1f} ms | {shares} | {late} | {ratio:.2f} |")
    lines += stages_table(result)
    counts = [each["result"]["counters"] for each in result["levels"]]
    asked = sum(each.get(ASKED, 0.0) for each in counts)
    if asked:
        lines.append(
            f"\n{sum(each[FOUND] for each in counts) / asked:.0%} of the prompts' tokens were in the prefix cache."
        )
    long = [each["result"]["long_ttft"] for each in result["levels"] if "long_ttft" in each["result"]]
    if long:
        middle = statistics.median(each["p50"] for each in long) * 1e3
        lines.append(
            f"\nThe prompts of {LONG:,} tokens: TTFT p50 {middle:.0f} ms. They are not among the others above."
        )
    machine = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    made = record.made_at([machine | each for each in result["levels"]])
    kind = WORKS[result["work"].get("kind", "random")]
    lines.append(
        f"\n`{result['command']}` on one NVIDIA H200, {result['shape']}, {result['work']['requests']} requests from "
        f"{result['generator']}{kind}, {versions}, {made}; "
        f"ready after {result['ready_s']:.0f} s.\n"
    )
    return "\n".join(lines)


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge into one result with the levels of all; each names its commit. Of a rate and seed the last one counts.

    Raises:
        ValueError: they are not of the same work on the same shape.
    """
    same = ("command", "shape", "options", "generator", "work")
    for name in same:
        if any(each[name] != results[0][name] for each in results):
            raise ValueError(f"these results differ in their {name}: merge those of the same work")
    levels: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        made = {name: result["environment"][name] for name in ("commit", "version")}
        levels |= {(level["rate"], level["seed"]): made | level for level in result["levels"]}
    return results[0] | {"levels": [levels[key] for key in sorted(levels, key=lambda key: (float(key[0]), key[1]))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merge", type=Path, nargs="+", help="results that become one, at --out; nothing is measured")
    parser.add_argument("--rates", default="8,24,40,inf", help="requests per second; inf: all at once")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--generator", choices=GENERATORS, default="transect")
    parser.add_argument(
        "--work",
        default="random",
        help="random, prefixes, chats, short or long; several, but random: from one server, each to a file of its own",
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a preset, or a folder with a config.json")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further level begins")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "serve_load.json")
    parser.add_argument("--keep-log", type=Path, help="where the decision log is copied to")
    parser.add_argument("options", nargs="*", help="further options of transect serve, after --")
    options = parser.parse_args()
    if options.merge:
        whole = merged([json.loads(path.read_text()) for path in options.merge])
        record.write(options.out, whole)
        print(table(whole))
        return
    works = options.work.split(",")
    if set(works) - WORKS.keys() or ("random" in works and len(works) > 1):
        parser.error(
            "--work is random, or some of prefixes, chats, short and long, which share a server with a prefix cache"
        )
    outs = [options.out.with_stem(f"{options.out.stem}_{work}") for work in works] if works[1:] else [options.out]
    measure(options, {work: (empty(options, work), out) for work, out in zip(works, outs, strict=True)})


def empty(options: argparse.Namespace, work: str) -> dict[str, Any]:
    """Return a result without levels. Prefixes come from SGLang's generator, other work but random from this
    project's."""
    sglang = work == "prefixes" or (work == "random" and options.generator == "sglang")
    return {
        "command": "python benchmarks/server/load.py"
        + (f" --work {work}" if work != "random" else " --generator sglang" if sglang else ""),
        "environment": record.environment(("torch", "triton")),
        "shape": options.shape,
        "options": options.options,
        "generator": "sglang.bench_serving" if sglang else "transect bench serve",
        "work": {"kind": work, "requests": options.requests, "prompt": PROMPT, "output": OUTPUT},
        "levels": [],
    }


def measure(options: argparse.Namespace, results: dict[str, tuple[dict[str, Any], Path]]) -> None:
    """Start a server and run the levels of each kind of work; fill the results, and write each after every level."""
    began = time.perf_counter()
    pairs = [(float(rate), seed) for seed in map(int, options.seeds.split(",")) for rate in options.rates.split(",")]
    runs: dict[str, list[Result | None]] = {work: [] for work in results}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        others = None
        if any(result["generator"].startswith("sglang") for result, _ in results.values()):
            others = SglangGenerator()
            stack.callback(others.close)
        folder = model_folder(options.shape, Path(name) / "model")
        log = Path(name) / "decisions.log"
        try:
            with server(folder, log, options.options, caching="random" not in results) as (url, ready_s):
                for (rate, seed), (work, (result, out)) in itertools.product(pairs, results.items()):
                    if time.perf_counter() - began > options.limit:
                        continue
                    result["ready_s"] = ready_s
                    sender = others if result["generator"].startswith("sglang") else None
                    summary, requests = run(url, sender, work, folder, rate, options.requests, seed)
                    runs[work].append(requests)
                    result["levels"].append({"rate": f"{rate:g}", "seed": seed, "result": summary})
                    print(row(f"{rate:g}", f"{work}, seed {seed}", figures(summary)), summary["counters"], flush=True)
                    record.write(out, result)
        except Exception:
            traceback.print_exc()
        if log.exists() and options.keep_log is not None:
            shutil.copy(log, options.keep_log)
        for work, (result, out) in results.items():
            if result["levels"]:
                explain(result, runs[work], log)
                record.write(out, result)
                print(table(result), flush=True)


def explain(result: dict[str, Any], runs: Sequence[Result | None], path: Path) -> None:
    """Add to each level what the decision log says about it."""
    log = load(path)
    for each, requests in zip(result["levels"], runs, strict=True):
        summary = each["result"]
        each["timeline"] = timeline(log, summary["began"], summary["ended"])
        print(f"rate {each['rate']}, seed {each['seed']}: {json.dumps(each['timeline'].get('causes'))}")
        if requests is not None:
            each["stages"] = request_stages(log, requests.records, requests.began)
            print(stages_line(each["stages"]), flush=True)


if __name__ == "__main__":
    main()
