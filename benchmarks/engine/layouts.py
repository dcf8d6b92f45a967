"""The throughput protocol of an 8B model on two GPUs: pipeline stages, and two engines.

    python benchmarks/engine/layouts.py [stages] [shares] [--out DIRECTORY]

``stages``: ``pipeline_parallel_size=2``. ``shares``: one engine on each GPU with every second request, as a server with
``data_parallel_size=2`` has them; both begin at the same moment, and the last to end counts. Random weights of true
shapes; tensor parallelism on the same work is ``engine/tensor_parallel.py``. Predictions
(``transect.costs.serving``) are made of recorded coefficients, and written down before an engine starts. Each
section is kept as soon as it is measured, in ``DIRECTORY/layouts_llama-3.1-8b.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import RATES, Kept, engine
from benchmarks.engine.tensor_parallel import BASE
from transect.bench.offline import run_all
from transect.bench.workload import Work, throughput_protocol
from transect.costs.floors import batch_floor
from transect.costs.links import MeasuredLinks
from transect.costs.serving import HOPPER, ServingSteps, batch_seconds
from transect.engine.frontends.llm import LLM
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

GPUS = 2


def lengths_of(work: list[Work]) -> list[tuple[int, int]]:
    return [(len(each.prompt), each.output_tokens) for each in work]


def drawn(work: list[Work]) -> int:
    return sum(each.output_tokens for each in work)


def predictions() -> dict[str, float]:
    """Predict the protocol's tokens per second."""
    work, found = throughput_protocol(), {}
    sums = json.loads((record.RESULTS / "h200" / f"tp_{BASE}.json").read_text())["sections"]["tp2 links"]["result"]
    hops = MeasuredLinks({int(size): seconds for size, seconds in sums["library"].items()}).among(GPUS)
    for name, layout in {"stages": RankLayout(pipeline=GPUS), "shares": RankLayout(data=GPUS)}.items():
        steps = ServingSteps(PRESETS[BASE], RATES, HOPPER["bf16"], None, layout, hops=hops)
        found[name] = drawn(work) / batch_seconds(steps, lengths_of(work))
    return found


def result(name: str, seconds: float, said: dict[str, float]) -> dict[str, Any]:
    """Return the protocol's result, beside the prediction and the floor of two GPUs that share the work evenly."""
    work = throughput_protocol()
    parts = batch_floor(PRESETS[BASE], lengths_of(work), RATES, layout=RankLayout(tensor=GPUS))
    floor = sum(part.seconds for part in parts)
    rate = drawn(work) / seconds
    print(
        f"  throughput {BASE}, {name}: {rate:,.0f} tok/s, floor {drawn(work) / floor:,.0f}, {floor / seconds:.1%}, "
        f"predicted {said[name] / rate - 1:+.1%} off",
        flush=True,
    )
    return {
        "seconds": record.summary([seconds]),
        "tokens_per_s": rate,
        "floor_tokens_per_s": drawn(work) / floor,
        "of_floor": floor / seconds,
        "predicted_tokens_per_s": said[name],
    }


def warm(llm: LLM) -> None:
    run_all(llm, [Work(each.prompt, 20) for each in throughput_protocol()[:16]])


def stages(kept: Kept, said: dict[str, float]) -> None:
    """Measure two stages, in this process and another."""
    llm = engine(BASE, pipeline_parallel_size=GPUS)
    warm(llm)
    kept.attempt("stages throughput", lambda: result("stages", run_all(llm, throughput_protocol())[0], said))


def share(part: int, begin: Path, out: Path) -> None:
    """Run one engine's part of the requests; records when it began and ended."""
    llm = engine(BASE)
    warm(llm)
    work = throughput_protocol()[part::GPUS]
    begin.with_name(f"ready{part}").touch()
    while not begin.exists():
        time.sleep(0.001)
    began = time.monotonic()
    run_all(llm, work)
    out.write_text(json.dumps({"began": began, "ended": time.monotonic(), "tokens": drawn(work)}))


def shares(kept: Kept, said: dict[str, float], folder: Path) -> None:
    """Measure one engine on each GPU."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    begin = folder / "begin"
    children = []
    for part in range(GPUS):
        command = [sys.executable, __file__, "--part", str(part), "--folder", str(folder)]
        children.append(subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": seen[part]}))
    while not all((folder / f"ready{part}").exists() for part in range(GPUS)):
        if any(child.poll() is not None for child in children):
            raise RuntimeError("an engine did not start")
        time.sleep(0.05)
    begin.touch()
    if any(child.wait() for child in children):
        raise RuntimeError("an engine failed")
    found = [json.loads((folder / f"part{part}.json").read_text()) for part in range(GPUS)]
    seconds = max(each["ended"] for each in found) - min(each["began"] for each in found)
    each = [one["ended"] - one["began"] for one in found]
    kept.attempt("shares throughput", lambda: result("shares", seconds, said) | {"seconds_of_each": each})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="of shares, stages; default: both")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        share(options.part, options.folder / "begin", options.folder / f"part{options.part}.json")
        sys.stdout.flush()
        os._exit(0)
    kept = Kept(options.out / f"layouts_{BASE}.json")
    said = kept.attempt("predicted", predictions)
    for name, rate in said.items():
        print(f"  predicted, {name}: {rate:,.0f} tok/s", flush=True)
    wanted = options.sections or ["shares", "stages"]
    if "shares" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            shares(kept, said, Path(folder))
    if "stages" in wanted:
        stages(kept, said)
    sys.stdout.flush()
    os._exit(0)  # ranks end with this process


if __name__ == "__main__":
    main()
