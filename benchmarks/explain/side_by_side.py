"""The same traces in four tools: this one, the TensorBoard plugin of torch.profiler, HTA and TraceLens.

    python benchmarks/explain/side_by_side.py [TRACES]

Needs `pip install torch-tb-profiler HolisticTraceAnalysis`, and TraceLens from its repository (PyPI has another program
of that name); a tool that is missing is left out. The default traces were recorded on an H200 and are tests as well.
Kept is what each tool says about the whole trace: its summary, its largest entries, and its advice.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.costs.presets import preset
from transect.explain.program.explain import explain_trace
from transect.explain.program.split import PARTS
from transect.explain.program.trace_file import read_trace

FOLDER = record.ROOT / "tests" / "explain" / "program" / "traces"
TRACES = ("gpu_unpinned_copies", "gpu_float32_products", "gpu_sync_in_the_loop")
CARD = "h200"
SHORT = 60


def transect(path: Path, folder: Path) -> dict[str, Any]:
    """Explain a trace: parts above 1%, and findings."""
    found = explain_trace(read_trace(path), preset(CARD).ceilings())
    parts = {PARTS[part]: found.split.share(part) for part in PARTS if found.split.share(part) > 0.01}
    said = [f"{each.title}: {each.share:.0%} to gain; {each.advice}" for each in found.findings]
    return {"summary": {name: f"{share:.0%}" for name, share in parts.items()}, "advice": said}


def tensorboard(path: Path, folder: Path) -> dict[str, Any]:
    """Read a trace as the plugin does: its overview, its largest operators, its recommendations."""
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.event_parser import ProfileRole

    copy = folder / "worker0.1700000000000.pt.trace.json.gz"
    shutil.copy(path, copy)
    run = RunProfileData.parse("worker0", "1", str(copy), str(folder))
    costs, total = run.avg_costs.costs, run.avg_costs.costs[ProfileRole.Total]
    roles = {role.name: f"{costs[role] / total:.0%}" for role in ProfileRole if role.name != "Total"}
    ops = sorted(run.op_list_groupby_name, key=lambda op: -op.self_device_duration)[:2]
    largest = [f"{op.name}: {op.self_device_duration / 1e3:.1f} ms on the device" for op in ops]
    if run.kernel_stat is not None:
        kernels = run.kernel_stat.sort_values("sum", ascending=False).head(2)
        largest += [f"{name[:SHORT]}: {row['sum'] / 1e3:.1f} ms" for name, row in kernels.iterrows()]
    return {"summary": roles, "largest": largest, "advice": [str(each) for each in run.recommendations]}


def hta(path: Path, folder: Path) -> dict[str, Any]:
    """Analyse a trace with Holistic Trace Analysis: busy, idle and why, kinds of kernels."""
    from hta.trace_analysis import TraceAnalysis

    events = json.loads(gzip.decompress(path.read_bytes()))
    events.setdefault("distributedInfo", {"rank": 0})  # it needs the rank of a job
    copy = folder / "rank0.json.gz"
    copy.write_bytes(gzip.compress(json.dumps(events).encode()))
    analysis = TraceAnalysis(trace_files={0: str(copy)}, trace_dir=str(folder))
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    idle = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
    kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
    summary = {
        "idle": f"{times['idle_time_pctg']:.0f}%",
        "compute": f"{times['compute_time_pctg']:.0f}%",
        "non-compute": f"{times['non_compute_time_pctg']:.0f}%",
    } | {row["idle_category"]: f"{row['idle_time_ratio']:.0%} of idle" for _, row in idle.iterrows()}
    largest = [f"{row['kernel_type']}: {row['percentage']:.0f}% of kernels" for _, row in kinds.iterrows()]
    names = [f"{row['name'][:SHORT]}: {row['sum (us)'] / 1e3:.1f} ms" for _, row in kernels.head(2).iterrows()]
    return {"summary": summary, "largest": largest + names, "advice": []}


def tracelens(path: Path, folder: Path) -> dict[str, Any]:
    """Make TraceLens' report of performance: timeline, largest operators, rates of products."""
    command = [sys.executable, "-m", "TraceLens.Reporting.generate_perf_report_pytorch"]
    command += ["--profile_json_path", str(path), "--output_csvs_dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True)

    def rows(name: str) -> list[dict[str, str]]:
        file = folder / f"{name}.csv"
        return list(csv.DictReader(file.open())) if file.exists() else []

    timeline = {row["type"]: f"{float(row['percent']):.0f}%" for row in rows("gpu_timeline")}
    largest = [f"{row['name']}: {float(row['Percentage (%)']):.0f}%" for row in rows("ops_summary")[:3]]
    rates = [
        f"{row['name']}: {float(row['TFLOPS/s_mean']):.1f} TFLOP/s, {float(row['TB/s_mean']):.2f} TB/s"
        for row in rows("unified_perf_summary")[:2]
        if row.get("TFLOPS/s_mean")
    ]
    return {"summary": timeline, "largest": largest + rates, "advice": []}


TOOLS: dict[str, tuple[str, Callable[[Path, Path], dict[str, Any]]]] = {
    "transect explain trace": ("", transect),
    "TensorBoard plugin": ("torch-tb-profiler", tensorboard),
    "HTA": ("HolisticTraceAnalysis", hta),
    "TraceLens": ("TraceLens", tracelens),
}


def table(result: dict[str, Any]) -> str:
    """Format the answers of all tools, trace by trace."""
    lines = []
    for trace, answers in result["traces"].items():
        lines += [f"**{trace.removeprefix('gpu_').replace('_', ' ')}**", ""]
        lines += ["| tool | summary | largest entries | advice |", "|---|---|---|---|"]
        for tool, answer in answers.items():
            summary = ", ".join(
                f"{name} {value}" for name, value in answer["summary"].items() if not value.startswith("0%")
            )
            cells = [summary, "; ".join(answer.get("largest", [])), "; ".join(answer["advice"]) or "none"]
            lines.append(
                f"| {tool} | " + " | ".join(each.replace("|", "/").replace("\n", " ") for each in cells) + " |"
            )
        lines.append("")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(lines) + f"{versions}; `{result['command']}`, {record.made_at([result['environment']])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=TRACES, help="names of recorded traces")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "explain_side_by_side.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    result: dict[str, Any] = {
        "command": "python benchmarks/explain/side_by_side.py",
        "environment": record.environment(),
        "versions": {},
        "traces": {},
    }
    for name in options.traces:
        answers = result["traces"][name] = {}
        for tool, (package, read) in TOOLS.items():
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                try:
                    answers[tool] = read(FOLDER / f"{name}.json.gz", Path(folder))
                except (ImportError, subprocess.CalledProcessError) as error:
                    print(f"{tool} is left out: {error}", flush=True)
                    continue
                answers[tool]["seconds"] = time.perf_counter() - began
            if package:
                try:
                    result["versions"][tool] = metadata.version(package)
                except metadata.PackageNotFoundError:
                    result["versions"][tool] = "from its repository"
            print(name, tool, json.dumps(answers[tool], indent=1), flush=True)
    record.write(options.out, result)


if __name__ == "__main__":
    main()
