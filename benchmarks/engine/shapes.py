"""Decode steps of ten popular shapes, from 0.5 to 32 billion parameters, beside their floors, on one GPU.

    python benchmarks/engine/shapes.py [NAME ...] [--rows 1,16,48,200] [--limit SECONDS] [--out FILE]

Random weights; prompts of 256 tokens, then steps in which all sequences decode. The time of a step is wall time as seen
by the caller of ``LLM.step``. Floors are as in ``transect.costs.floors``: the matrices of all layers together, and the
head, take as long as their bytes or their FLOPs, whichever takes longer, and reading keys and values comes on top.
Clock and power of the GPU are read meanwhile, and medians kept. A shape is kept as soon as it is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.popular_shapes import SHAPES
from benchmarks.peers import vllm
from benchmarks.server.load import model_folder
from transect.bench.energy import Nvml
from transect.bench.offline import decode_steps
from transect.costs.floors import Rates, step_floor
from transect.costs.model import Row
from transect.engine.frontends.llm import LLM
from transect.spec.hf import from_hf

RATES = Rates(4.35e12, 750e12, "H200, measured")
PROMPT, STEPS = 256, 48


class Watch:
    """Reads clock and power of the first GPU that is visible, every hundredth of a second, while it is open."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        try:
            source = Nvml()
            while not self._over.wait(0.01):
                device = int(visible)
                self.seen.append((time.perf_counter(), source.megahertz(device), source.watts(device)))
        except ValueError as error:
            print(f"no clocks: {error}")

    def since(self, begin: float) -> dict[str, float]:
        """Return the medians from ``begin`` on; empty if nothing could be read."""
        late = [each for each in self.seen if each[0] >= begin]
        names = ("megahertz", "watts")
        return {name: statistics.median(each[1 + i] for each in late) for i, name in enumerate(names) if late}


def shape(name: str, rows: list[int], folder: Path, runs: int) -> dict[str, Any]:
    """Measure one shape by numbers of rows."""
    config = SHAPES[name].config()
    (folder / "shape").mkdir(exist_ok=True)
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    model = model_folder(str(folder / "shape"), folder / name)
    llm = LLM(str(model), load_format="dummy", max_model_len=1024, enable_prefix_caching=False, seed=0)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for count in rows:
        prompts = torch.randint(0, 10000, (count, PROMPT), generator=generator).tolist()
        spare = -(-count * PROMPT // 8192) + 2
        with Watch() as watch:
            decoded = [decode_steps(llm, prompts, STEPS, spare) for _ in range(runs)]
            clocks = watch.since(time.perf_counter() - decoded[-1].seconds)
        floor = step_floor(from_hf(config), [Row(1, length) for length in decoded[0].middle], RATES)
        times = record.summary([each.per_token for each in decoded])
        found[str(count)] = {"step_s": times, "floor_s": floor.seconds, "of_floor": floor.seconds / times["median"]}
        found[str(count)] |= {"vllm_s": vllm.STEPS.get((name, count))} | clocks
        print(f"{name} {count} rows: {json.dumps(found[str(count)])}", flush=True)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return found


def page(result: dict[str, Any]) -> str:
    """Format a page: milliseconds of a step, and the share of its floor."""
    rows = sorted({int(count) for each in result["shapes"].values() for count in each["rows"]})
    lines = ["| shape | " + " | ".join(f"{count} rows" for count in rows) + " |", "|---" * (1 + len(rows)) + "|"]
    for name, each in result["shapes"].items():
        cells = [each["rows"][str(count)] for count in rows]
        shown = (f"{cell['step_s']['median'] * 1e3:.2f} ms, {cell['of_floor']:.0%}" for cell in cells)
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += _clocks(result, rows)
    versions = ", ".join(f"{name} {version}" for name, version in result["environment"]["packages"].items())
    runs = [each | {"version": result["environment"]["version"]} for each in result["shapes"].values()]
    lines.append(f"\n`{result['command']}` on one {result['gpu']}, {versions}, {record.made_at(runs)}, one run.\n")
    return "\n".join(lines)


def _clocks(result: dict[str, Any], rows: list[int]) -> list[str]:
    """Format a table of the clock and the power during the runs; empty if no shape has them."""
    lines = ["", "| clock and power | " + " | ".join(f"{count} rows" for count in rows) + " |"]
    lines.append("|---" * (1 + len(rows)) + "|")
    for name, each in result["shapes"].items():
        cells = [each["rows"][str(count)] for count in rows]
        if all("megahertz" in cell for cell in cells):
            shown = (f"{cell['megahertz']:.0f} MHz, {cell['watts']:.0f} W" for cell in cells)
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines if len(lines) > 3 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--rows", default="1,16,48,200")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further shape begins")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "shapes.json")
    options = parser.parse_args()
    began = time.perf_counter()
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"shapes": {}}
    kept |= {"command": "python benchmarks/engine/shapes.py", "environment": record.environment(("torch", "triton"))}
    kept["gpu"] = torch.cuda.get_device_name()
    for name in options.names or SHAPES:
        if time.perf_counter() - began > options.limit:
            break
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = shape(name, [int(each) for each in options.rows.split(",")], Path(folder), options.runs)
        except Exception:
            traceback.print_exc()
            continue
        kept["shapes"][name] = {"commit": record.commit(), "rows": found}
        record.write(options.out, kept)


if __name__ == "__main__":
    main()
