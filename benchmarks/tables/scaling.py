"""The recorded figures of tensor parallelism (``engine/tensor_parallel.py``) as Markdown. Loads no torch."""

from __future__ import annotations

import json
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.tables import engine as engine_tables

MODELS = ("llama-3.1-8b", "llama-3.3-70b")


def load() -> dict[str, dict[str, Any]]:
    """Load the sections of ``tp_*.json`` by model."""
    folder = record.RESULTS / "h200"
    paths = {model: folder / f"tp_{model}.json" for model in MODELS}
    return {model: json.loads(path.read_text())["sections"] for model, path in paths.items() if path.exists()}


def _one_gpu(model: str) -> dict[str, Any]:
    path = record.RESULTS / "h200" / f"engine_{model}.json"
    return json.loads(path.read_text())["sections"] if path.exists() else {}


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f} tok/s"


def table(files: dict[str, dict[str, Any]]) -> str:
    """Decode and the throughput protocol on one and two GPUs, measured; on two, four and eight, predicted."""
    peer = engine_tables.vllm()
    rows: list[tuple[str, ...]] = []
    for model, sections in files.items():
        alone = _one_gpu(model)
        ours = "tp2" if any(name.startswith("tp2 ") and "links" not in name for name in sections) else "tp2-nccl"
        said = sections.get("predicted" if ours == "tp2" else "predicted-nccl", {"result": {}})["result"]
        theirs = peer["four_gpus"]["models"].get(model, {})
        for name in sorted((n for n in sections if n.startswith(f"{ours} decode")), key=lambda n: int(n.split()[-1])):
            found, batch = sections[name]["result"], name.split()[-1]
            nccl = sections.get(f"tp2-nccl decode {batch}", {"result": None})["result"]
            one = alone.get(f"decode {batch}", {"result": None})["result"]
            expected = [said.get(n, {}).get("decode_s", {}).get(batch) for n in ("2", "4", "8")]
            cells = (
                None if one is None else one["step_s"]["median"],
                None if nccl is None else nccl["step_s"]["median"],
                found["step_s"]["median"],
                found["floor_s"],
            )
            rows.append(
                _row(model, f"decode, batch {batch}", cells, expected, theirs.get("decode_s", {}).get(batch), _time)
            )
        if name := next((n for n in sections if n == f"{ours} throughput"), None):
            found = sections[name]["result"]
            nccl = sections.get("tp2-nccl throughput", {"result": None})["result"]
            one = alone.get("throughput", {"result": None})["result"]
            expected = [said.get(n, {}).get("tokens_per_s") for n in ("2", "4", "8")]
            cells = (
                None if one is None else one["tokens_per_s"],
                None if nccl is None else nccl["tokens_per_s"],
                found["tokens_per_s"],
                found["floor_tokens_per_s"],
            )
            rows.append(_row(model, "throughput", cells, expected, theirs.get("tokens_per_s"), _rate))
    head = (
        "model", "work", "1 GPU", "2 GPUs, NCCL", "2 GPUs", "floor", "of floor", "predicted for 2", "off",
        "4, predicted", "8, predicted", f"vLLM {peer['version']} on 4",
    )  # fmt: skip
    kept = [section for sections in files.values() for section in sections.values()]
    return (
        engine_tables._rows(head, rows)
        + f"\n`python benchmarks/engine/tensor_parallel.py` on two NVIDIA H200, {record.made_at(kept)}, one run. Four "
        f"and eight GPUs were not available: their columns are predictions. vLLM {peer['version']}: "
        f"{peer['four_gpus']['provenance']}.\n"
    )


def _row(
    model: str,
    work: str,
    cells: tuple[float | None, float | None, float, float],
    expected: list[float | None],
    theirs: float | None,
    shown: Any,
) -> tuple[str, ...]:
    *others, found, floor = cells
    share = floor / found if shown is _time else found / floor
    off = "" if expected[0] is None else f"{expected[0] / found - 1:+.0%}"
    last = [shown(each) for each in expected]
    return (
        model,
        work,
        *map(shown, others),
        shown(found),
        shown(floor),
        f"{share:.0%}",
        last[0],
        off,
        *last[1:],
        shown(theirs),
    )


def layouts_table(tensor: dict[str, Any], others: dict[str, Any]) -> str:
    """Format the throughput protocol of the 8B on two GPUs in three layouts, predicted, and measured if available."""
    said = others["predicted"]["result"]
    found = {name: others.get(f"{name} throughput", {"result": {}})["result"].get("tokens_per_s") for name in said}
    by_tensor = tensor["tp2 throughput"]["result"]["tokens_per_s"]
    rows = [("tensor parallelism", tensor["predicted"]["result"]["2"]["tokens_per_s"], by_tensor)]
    names = {"stages": "two stages", "shares": "two engines"}
    rows += [(names[name], rate, found[name]) for name, rate in said.items()]
    kept = [tensor["tp2 throughput"], *others.values()]
    return (
        engine_tables._rows(
            ("layout", "predicted", "measured", "off"),
            [(name, _rate(rate), _rate(found), _off(rate, found)) for name, rate, found in rows],
        )
        + "\n`python benchmarks/engine/tensor_parallel.py`, `python benchmarks/engine/layouts.py`, "
        + f"{record.made_at(kept)}.\n"
    )


def _off(expected: float, found: float | None) -> str:
    return "" if found is None else f"{expected / found - 1:+.0%}"


def sums_table(kept: dict[str, Any]) -> str:
    """Format a sum over two GPUs inside a CUDA graph, by NCCL and by our kernel, beside the floor of the link."""
    found = {(row["collective"], row["bytes"]): row for row in kept["rows"] if row["in_place"]}
    rows = []
    for (name, size), nccl in found.items():
        if name == "all_reduce":
            ours = found.get(("all_reduce_ours", size))
            shown = "" if ours is None else f"{ours['seconds'] * 1e6:.1f} us"
            cells = (f"{size:,}", f"{nccl['floor'] * 1e6:.2f} us", f"{nccl['seconds'] * 1e6:.1f} us", shown)
            rows.append((*cells, "none" if nccl["wrong"] + (0 if ours is None else ours["wrong"]) == 0 else "some"))
    command = "transect bench collectives all_reduce all_reduce_ours --graphs --dtype bfloat16"
    origin = f"\n`{command}` on two NVIDIA H200, {record.made_at([kept['environment']])}, in place.\n"
    return engine_tables._rows(("bytes", "floor", "NCCL", "ours", "wrong"), rows) + origin
