"""The recorded figures of the GPU engine as Markdown: of each section the one that is kept. Loads no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

PROMPT = 512
PARTS = {
    "products with weights": r"(small|many)_rows|early_weights|^_rows|^_vector|^_persistent|gemm|nvjet|splitK|matmul",
    "attention": r"paged_decode|prefill|^_decode|^_paged|^_combine",
    "norms": r"^forward_kernel",
    "rotation, write to the cache": r"^_kernel$",
    "gate": r"^_halves",
    "draws": r"^_groups|^_settle|^_collect|^_choose|^_adjust",
    "copies": r"[Mm]emcpy|^_copy_row",
}
"""Regular expressions of kernels' names, by part of a step; the first that is found counts."""
STAGES = {
    "schedule": ("`engine/scheduling/scheduler.py`", "choose rows, token counts and KV blocks"),
    "submit": ("`engine/executors/gpu/runner.py`", "fill and copy the inputs, launch the graph"),
    "read": ("`engine/executors/gpu/runner.py`", "read the tokens of the previous step"),
    "commit": ("`engine/scheduling/scheduler.py`", "append tokens, detect ends, free or cache blocks"),
}
OTHER, IDLE = "other kernels", "nothing runs"


def load() -> dict[str, dict[str, Any]]:
    """Load the files of ``engine/gpu.py`` by model.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted((record.RESULTS / "h200").glob("engine_*.json"))
    read = {path.stem.removeprefix("engine_"): json.loads(path.read_text()) for path in files}
    kept = {name: known for name, known in read.items() if "sections" in known}
    if not kept:
        raise FileNotFoundError("benchmarks/results/h200/engine_*.json: run benchmarks/engine/gpu.py on the GPU")
    return kept


def sections(known: dict[str, Any], begin: str) -> list[Any]:
    """List the results whose names begin with this word."""
    return [section["result"] for name, section in known["sections"].items() if name.split()[0] == begin]


def vllm() -> dict[str, Any]:
    """Load vLLM's figures, which were measured separately."""
    return json.loads((record.RESULTS / "h200" / "vllm.json").read_text())


def _beside(peer: dict[str, Any], model: str, work: str, batch: int | None = None) -> str:
    """Format one of vLLM's figures; empty if there is none."""
    found = peer["models"].get(model, {}).get(work)
    found = found.get(str(batch)) if isinstance(found, dict) else found
    if found is None:
        return ""
    return {"decode_s": f"{found * 1e3:.2f} ms", "prefill_s": f"{found:.2f} s", "tokens_per_s": f"{found:,.0f} tok/s"}[
        work
    ]


def _apart(peer: dict[str, Any]) -> str:
    """Format the origin of vLLM's figures in one sentence."""
    started = [f"{model} {found['start_s']} s" for model, found in peer["models"].items() if "start_s" in found]
    return (
        f"vLLM {peer['version']} was {peer['provenance']}. From its start to its first token: {', '.join(started)}.\n"
    )


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def origin(files: dict[str, dict[str, Any]], sections: Iterable[str], runs: str = "") -> str:
    """Format the origin of the figures in one sentence."""
    wanted = set(sections)
    kept = [
        section for known in files.values() for name, section in known["sections"].items() if name.split()[0] in wanted
    ]
    environment = next(iter(files.values()))["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    command = f"python benchmarks/engine/gpu.py {' '.join(sections)}"
    return f"\n`{command}` on one {environment['gpu']}, {packages}, {record.made_at(kept)}{runs}.\n"


def _decodesections(known: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(sections(known, "decode"), key=lambda row: row["batch"])


def _spread(low: float, high: float, runs: int, form: str) -> str:
    return "one run" if runs == 1 else f"{low:{form}} - {high:{form}}"


def main_table(files: dict[str, dict[str, Any]]) -> str:
    """Decode, prefill and throughput beside the floor."""
    rows, peer = [], vllm()
    for model, known in files.items():
        for row in _decodesections(known):
            step, floor = row["step_s"], row["floor_s"]
            rows.append(
                (
                    model,
                    f"decode, batch {row['batch']}",
                    f"{floor * 1e3:.2f} ms",
                    f"{step['median'] * 1e3:.2f} ms",
                    _spread(step["min"] * 1e3, step["max"] * 1e3, step["runs"], ".2f"),
                    f"{row['of_floor']:.0%}",
                    _beside(peer, model, "decode_s", row["batch"]),
                )
            )
        for row in sections(known, "prefill"):
            found = row["seconds"]
            spread = _spread(found["min"], found["max"], found["runs"], ".2f")
            cells = (f"{row['floor_s']:.2f} s", f"{found['median']:.2f} s", spread, f"{row['of_floor']:.0%}")
            rows.append((model, f"prefill, 256 x {PROMPT}", *cells, _beside(peer, model, "prefill_s")))
        for row in sections(known, "throughput"):
            low, high = (row["output_tokens"] / row["seconds"][end] for end in ("max", "min"))
            cells = (f"{row['floor_tokens_per_s']:,.0f} tok/s", f"{row['tokens_per_s']:,.0f} tok/s")
            spread = _spread(low, high, row["seconds"]["runs"], ",.0f")
            beside = _beside(peer, model, "tokens_per_s")
            rows.append((model, "throughput", *cells, spread, f"{row['of_floor']:.0%}", beside))
            if plain := row.get("unfilled_tokens_per_s"):
                share = f"{plain / row['floor_tokens_per_s']:.0%}"
                work = "throughput, `mixed_step_limit='full'`"
                rows.append((model, work, cells[0], f"{plain:,.0f} tok/s", "one run", share, ""))
    head = ("model", "work", "floor", "median", "min - max", "of floor", f"vLLM {peer['version']}, other run")
    return _rows(head, rows) + origin(files, ("decode", "prefill", "throughput")) + "\n" + _apart(peer)


def short_table(files: dict[str, dict[str, Any]], model: str = "llama-3.1-8b") -> str:
    """Format the lines of ``main_table`` that a chapter shows: one model, three batches, and the long work."""
    shown = ("decode, batch 1 ", "decode, batch 64 ", "decode, batch 256 ", "prefill", "throughput |")
    head, rule, *rest = main_table({model: files[model]}).splitlines()
    rows = [line for line in rest if line.startswith("|") and any(f"| {work}" in line for work in shown)]
    where = origin({model: files[model]}, ("decode", "prefill", "throughput"))
    return "\n".join([head, rule, *rows]) + "\n" + where + "\n" + _apart(vllm())


def energy_table(files: dict[str, dict[str, Any]]) -> str:
    """Format the joules of the throughput protocol."""
    rows = []
    for model, known in files.items():
        for row in sections(known, "throughput"):
            if row.get("energy"):
                used = row["energy"]
                rows.append((model, f"{used['joules_per_output_token']:.3f}", f"{used['watts']:.0f}"))
    return _rows(("model", "joules per output token", "watts"), rows) + origin(files, ("throughput",))


def startup_table(files: dict[str, dict[str, Any]]) -> str:
    """Process start to first token, in parts."""
    lines = []
    for model, known in files.items():
        for runs in sections(known, "startup"):
            for run in runs:
                parts = ", ".join(
                    f"{name} {seconds:.1f}" for name, seconds in run["parts_s"].items() if seconds >= 0.05
                )
                lines.append((model, run["caches"], f"{run['total_s']:.1f} s", parts))
    return _rows(("model", "kernel caches", "start to first token", "of that, s"), lines) + origin(files, ("startup",))


def host_table(files: dict[str, dict[str, Any]]) -> str:
    """Format the host time of a step, and the share of time in which the GPU is idle."""
    rows = []
    for model, known in files.items():
        for row in sorted(sections(known, "trace"), key=lambda row: (row["mixed_options"], row["batch"])):
            options = "all mixed" if row["mixed_options"] else "temperature"
            host = (f"{row['parts_s'][name] * 1e3:.2f}" for name in STAGES)
            times = (f"{row['step_s'] * 1e3:.2f}", *host, f"{row['host_s'] * 1e3:.2f}", f"{row['idle_share']:.1%}")
            rows.append((model, str(row["batch"]), options, *times))
    head = ("model", "batch", "sampling options", "step, ms", *STAGES, "host in all", "GPU idle")
    return _rows(head, rows) + origin(files, ("trace",))


def parts_of(row: dict[str, Any]) -> dict[str, float]:
    """Split the microseconds of a traced step by part; they add up to the step."""
    parts = dict.fromkeys([*PARTS, OTHER, IDLE], 0.0)
    for name, microseconds in row["microseconds_a_step"].items():
        part = next((part for part, pattern in PARTS.items() if re.search(pattern, name)), OTHER)
        parts[part] += microseconds
    parts[IDLE] = row["idle_share"] * row["span_us"]
    return parts


def parts_table(files: dict[str, dict[str, Any]]) -> str:
    """Format the parts of a decode step's time."""
    columns = {
        f"{model}, {row['batch']}": parts_of(row)
        for model, known in files.items()
        for row in sorted(sections(known, "trace"), key=lambda row: row["batch"])
        if not row["mixed_options"]
    }
    rows = []
    for part in (*PARTS, OTHER, IDLE):
        cells = (f"{parts[part] / 1e3:.2f} ({parts[part] / sum(parts.values()):.0%})" for parts in columns.values())
        rows.append((part, *cells))
    rows.append(("**step**", *(f"{sum(parts.values()) / 1e3:.2f}" for parts in columns.values())))
    return _rows(("part, ms", *columns), rows) + origin(files, ("trace",))


def walk_table(files: dict[str, dict[str, Any]], model: str = "llama-3.1-8b") -> str:
    """Format one model's decode step by stage: the work of Python, and that of the device at the same time."""
    traces = {
        f"decode step of {row['batch']}": row
        for row in sorted(sections(files[model], "trace"), key=lambda row: row["batch"])
        if not row["mixed_options"]
    }
    rows = []
    for name, (where, what) in STAGES.items():
        rows.append((what, where, *(_milliseconds(row["parts_s"][name]) for row in traces.values())))
    host = (_milliseconds(row["host_s"]) for row in traces.values())
    rows.append(("**the host in all**", "", *host))
    parts = [parts_of(row) for row in traces.values()]
    for part in (*PARTS, OTHER, IDLE):
        rows.append((part, "the device", *(_milliseconds(found[part] * 1e-6) for found in parts)))
    rows.append(("**the step**", "", *(_milliseconds(row["step_s"]) for row in traces.values())))
    rows.append(("**its floor**", "", *(_milliseconds(row["floor_s"]) for row in traces.values())))
    return _rows(("stage", "where", *traces), rows) + origin({model: files[model]}, ("trace",))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def ablation_table(files: dict[str, dict[str, Any]]) -> str:
    """Format the short work with one thing off each; in brackets, the time over that with everything on."""
    rows = []
    for model, known in files.items():
        for found in sections(known, "ablation"):
            base = found["everything on"]
            for name, row in found.items():
                cells = [_ratio(row["prefill_s"], base["prefill_s"], 1, "s")]
                cells += [
                    _ratio(seconds, base["decode_s"][batch], 1e3, "ms") for batch, seconds in row["decode_s"].items()
                ]
                rows.append((model, name, *cells))
    head = ("model", "", "prefill, 256 x 512", "decode, 256", "decode, 64", "decode, 1")
    return _rows(head, rows) + origin(files, ("ablation",))


def _ratio(value: float, base: float, scale: float, unit: str) -> str:
    return f"{value * scale:.2f} {unit}" + ("" if value == base else f" ({value / base:.2f}x)")


def deterministic_table(files: dict[str, dict[str, Any]]) -> str:
    """Format the cost of batch-invariant mode on the throughput protocol."""
    rows = []
    for model, known in files.items():
        for found in sections(known, "deterministic"):
            rates = (f"{found[mode]['tokens_per_s']:,.0f} tok/s" for mode in ("fast", "deterministic"))
            rows.append((model, *rates, f"{found['cost']:.1%}"))
    head = ("model", "as usual", "`--deterministic`", "cost")
    return _rows(head, rows) + origin(files, ("deterministic",))


def http_table(result: dict[str, Any]) -> str:
    """Format the work over HTTP and without it, on one GPU."""
    rows = []
    for name, work in result["work"].items():
        for way, title in (("offline", "engine alone"), ("http", "`bench serve`")):
            rate, gaps = work[way]["output_tokens_per_second"], work[way]["itl"]
            share = f"{work['ratio']:.1%}" if way == "http" else ""
            times = (f"{gaps[point] * 1e3:.2f} ms" if gaps else "" for point in ("p50", "p99"))
            rows.append((name, f"{work['model']}, {work['at_once']} at a time", title, f"{rate:,.0f}", share, *times))
    head = ("case", "work", "way", "output tok/s", "of engine alone", "gap between tokens, p50", "p99")
    machine = result["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    made_at = record.made_at(result["work"].values())
    return _rows(head, rows) + (
        f"\n`{result['command']}` on one {result['gpu']} and {machine['cores']} cores, {packages}, {made_at}.\n"
    )


def peers_table(result: dict[str, Any]) -> str:
    """Format batch 1 of the 8B shape beside transformers."""
    rows = []
    for name, found in result["ways"].items():
        times = found["token_s"]
        spread = f"{times['min'] * 1e3:.2f} - {times['max'] * 1e3:.2f}"
        rows.append((name, f"{times['median'] * 1e3:.2f}", spread, f"{1 / times['median']:.1f}"))
    machine = result["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return _rows(("program", "ms per token", "min - max", "tok/s"), rows) + (
        f"\n`{result['command']}` on one {result['gpu']}, {packages}, {record.made_at([machine])}, medians of "
        f"{min(found['token_s']['runs'] for found in result['ways'].values())} tokens or more.\n"
    )
