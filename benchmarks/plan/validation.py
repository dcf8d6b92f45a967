"""Predictions of ``transect plan serving`` held against servers, under loads that were not fitted.

    python benchmarks/plan/validation.py cpu [--model smollm2-135m] [--requests 40] [--seeds 0,1,2] [--out ...]
    python benchmarks/plan/validation.py gpu [--model llama-3.1-8b] [--requests 200] [--seeds 0] [--out ...]
    python benchmarks/plan/validation.py again --keep FOLDER [--out ...]
    python benchmarks/plan/validation.py h200 [--hour] [--out ...]

``cpu`` and ``gpu`` start a server on this machine, fit a profile on one synthetic sweep, and measure and predict other
loads (``cells.py``). ``again`` needs no GPU: it fits the sweep that ``gpu --keep FOLDER`` left, and predicts the
measured loads once more.

``h200`` needs no GPU. It simulates the recorded loads of ``serve_load.json`` from the data sheet of an H200 and the
coefficients of ``costs/serving.py``, which were fitted on offline steps. The seconds outside of the engine are fitted
on the lowest rate; the other rates are held out. The speed of the simulation is measured at the knee of several cards,
and without any decode: a request with an answer of one token, alone in its engine. ``--hour`` adds an hour of eight
engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.plan.cells import BURSTINESS, CPU, GPU, SHARES, Keep, figures, measure, predict_again
from benchmarks.server.generators import own_level
from benchmarks.server.load import model_folder
from transect.bench.lengths import Lengths
from transect.bench.traces.asked import Asked
from transect.bench.traces.mix import Mix
from transect.bench.traces.reading import read_trace
from transect.costs.presets import preset
from transect.plan.capacity import MixLoad, highest_rate, summary_of
from transect.plan.choices import CardChoice
from transect.plan.fleet import EngineModel, Fleet
from transect.plan.target import LatencyTarget
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

HOUR = Mix(prompt=Lengths.parse("lognormal:850,0.9,4050"), output=Lengths.parse("lognormal:180,0.6,1000"), burstiness=2)
HOUR_REQUESTS, HOUR_S = 19366, 3480
"""Requests and seconds of Azure's conversations of 2023; ``HOUR`` has their mean lengths."""
GPU_SHAPE = "llama-3.1-8b"
KNEES = (("l4", "bf16"), ("l4", "fp8"), ("l40s", "bf16"), ("h100-80gb", "bf16"), ("h200", "bf16"))
"""Cards and formats at whose knee the simulation is timed, with requests like Azure's."""
KNEE_TARGET, TIMED = "ttft.p99=2s,itl.p99=200ms", 600
ENGINES = 8
"""Engines of the fleet whose simulation is timed."""


def measured(options: argparse.Namespace, keep: Keep) -> None:
    """Calibrate, measure and predict a server on this machine. ``keep`` gets what is there after each cell."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.where == "cpu":
            measure(CPU, options.model or "smollm2-135m", folder, options, keep)
            return
        shape = options.model or GPU_SHAPE
        model = model_folder(shape, folder / "model")
        tokens = json.loads((model / "config.json").read_text())["vocab_size"]
        place = replace(GPU, highest=tokens - 1)
        measure(place, str(model), folder, options, lambda found: keep(found | {"model": shape}))


def speeds() -> dict[str, Any]:
    """Time the simulation of an 8B at the knee of several cards, and of requests that only come and go."""
    knees: list[dict[str, Any]] = []
    work = replace(HOUR, burstiness=1.0)
    for card, weights in KNEES:
        engine = CardChoice(PRESETS[GPU_SHAPE], preset(card), RankLayout(), weights, "auto", 8192).engine
        knee, _ = highest_rate(engine, MixLoad(work, TIMED // 2), LatencyTarget.parse(KNEE_TARGET), 2.0)
        assert knee is not None, f"{card} misses the target at any rate"
        knees.append({"card": card, "weights": weights, "rate": knee.rate} | _timed(engine, work, knee.rate))
        print(knees[-1], flush=True)
    short = replace(work, prompt=Lengths.parse("16"), output=Lengths.parse("1"))
    return {"target": KNEE_TARGET, "requests": TIMED, "knees": knees, "only_come_and_go": _timed(engine, short, 1.0)}


def _timed(engine: EngineModel, work: Mix, rate: float) -> dict[str, float]:
    """Return the simulated seconds of ``TIMED`` requests, the processor's seconds for that, the best of three, and the
    number of steps."""
    asked, taken = work.generate(rate, TIMED), []
    for _ in range(3):
        began = time.process_time()
        run = Fleet(engine).run(asked)
        taken.append(time.process_time() - began)
    return {"simulated_s": run.seconds, "processor_s": min(taken), "steps": run.steps}


def h200(options: argparse.Namespace) -> dict[str, Any]:
    """Predict the recorded loads of an H200."""
    recorded = json.loads((record.RESULTS / "h200" / "serve_load.json").read_text())
    choice = CardChoice(PRESETS[recorded["shape"]], preset("h200"), RankLayout(), "bf16", "auto", 16384)
    rows = []
    for level in sorted(recorded["levels"], key=lambda each: float(each["rate"])):
        work = own_level(float(level["rate"]), recorded["work"]["requests"], level["seed"], 128255).work
        asked = [Asked(each.at, len(str(each.prompt).split()), each.output_tokens) for each in work]
        began = time.process_time()
        run = Fleet(choice.engine).run(asked)
        taken = time.process_time() - began
        rows.append({
            "rate": level["rate"], "measured": figures(level["result"]), "predicted": figures(summary_of(run)),
            "simulated_s": run.seconds, "processor_s": taken,
        })  # fmt: skip
        for name, value in rows[-1]["measured"].items():
            guess = rows[-1]["predicted"][name]
            off = f"{1e3 * guess:.1f} of {1e3 * value:.1f} ms, {guess / value - 1:+.0%}"
            print(f"{level['rate']} requests/s {name}: {off}")
        print(f"{run.seconds:.1f} s in {taken:.2f} s of a processor", flush=True)
    found = {"model": recorded["shape"], "recorded": recorded["environment"], "levels": rows, "speed": speeds()}
    if options.hour:
        asked = (
            HOUR.generate(HOUR_REQUESTS / HOUR_S, HOUR_REQUESTS) if options.azure is None else read_trace(options.azure)
        )
        began = time.process_time()
        run = Fleet(choice.engine, ENGINES).run(asked)
        found["azure"] = {
            "requests": len(asked), "generated": options.azure is None, "engines": ENGINES, "simulated_s": run.seconds,
            "processor_s": time.process_time() - began, "steps": run.steps,
        }  # fmt: skip
        print(found["azure"], flush=True)
    return found


def cpu_table(result: dict[str, Any]) -> str:
    """Format the errors by share of the knee and burstiness, medians over the seeds, beside the spread of repeated
    runs."""
    cells = result["cells"]
    shown = ("ttft p50", "ttft p90", "ttft p99", "itl p99", "e2e p50")
    lines = [
        "| load | burstiness | runs | machine slowdown | "
        + " | ".join(f"{n.replace('ttft', 'TTFT')}" for n in shown)
        + " | each TTFT |",
        "|---" * (5 + len(shown)) + "|",
    ]
    for share in SHARES:
        for burst in BURSTINESS:
            rows = [each for each in cells if (each["share"], each["burstiness"]) == (share, burst)]
            if not rows:
                continue
            slow = statistics.median(each["slower"] for each in rows)
            parts = [_errors(rows, name) for name in shown]
            each_ttft = [statistics.median(each[key] for each in rows) for key in
                         ("ttft_error_each", "ttft_error_each_at_speed")]  # fmt: skip
            lines.append(
                f"| {share:.0%} | {burst:g} | {len(rows)} | {slow:.2f} x | {' | '.join(parts)} | "
                f"{each_ttft[0]:.0%}, {each_ttft[1]:.0%} |"
            )
    machine, made = result["environment"], result["sweep"]
    loads = [load for each in cells for load in each["machine_load"]]
    lines.append(
        f"\nEach cell: error of the prediction from the sweep alone, error with the machine's speed of each moment, "
        f"and (in parentheses) the spread of the first seed measured twice; medians over runs. {result['model']}, "
        f"{result['requests']} requests a run, knee {result['knee_requests_per_second']:.2f} requests/s. The machine "
        f"was shared: its load was {min(loads):.0f} to {max(loads):.0f} on {machine['cores']} cores, and held-out "
        f"steps of the sweep itself were off by {made['step_errors']['median']:.0%} at the median. "
        f"`{result['command']}`, {machine['processor']}, {record.made_at([machine])}.\n"
    )
    return "\n".join(lines)


def _errors(rows: list[dict[str, Any]], name: str) -> str:
    found = []
    for kind in ("predicted", "predicted_at_speed"):
        found.append(statistics.median(abs(each[kind][name] / each["measured"][name] - 1) for each in rows))
    first = rows[0]["seed"]
    again = [each["measured"][name] for each in rows if each["seed"] == first]
    spread = f" ({max(again) / min(again) - 1:.0%})" if len(again) > 1 else ""
    return f"{found[0]:.0%}, {found[1]:.0%}{spread}"


def h200_table(result: dict[str, Any]) -> str:
    """Format predicted and measured figures of each recorded rate."""
    names = [name for name in result["levels"][0]["measured"] if name != "itl p50"]
    lines = [
        "| requests/s | "
        + " | ".join(name.replace("ttft", "TTFT").replace("itl", "ITL") for name in names)
        + " | times real time |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in result["levels"]:
        cells = []
        for name in names:
            guess, value = row["predicted"][name], row["measured"][name]
            cells.append(f"{1e3 * guess:,.0f} of {1e3 * value:,.0f} ms, {guess / value - 1:+.0%}")
        rate = "all at once" if row["rate"] == "inf" else row["rate"]
        lines.append(f"| {rate} | {' | '.join(cells)} | {row['simulated_s'] / row['processor_s']:.0f} |")
    recorded, machine = result["recorded"], result["environment"]
    hour = ""
    if (azure := result.get("azure")) is not None:
        kind = "generated requests, as many and as long as" if azure.get("generated") else "requests of"
        hour = (
            f" {azure['requests']:,} {kind} Azure's conversations ({azure['simulated_s'] / 60:.0f} minutes) on "
            f"{azure['engines']} engines take {azure['processor_s']:.0f} s of one core."
        )
    lines.append(
        f"\n{result['model']}, error of predictions, {record.made_at([recorded])}; the simulation by "
        f"`{result['command']}` on {machine['processor']}, {record.made_at([machine])}.{hour}\n"
    )
    return "\n".join(lines)


def speed_table(result: dict[str, Any]) -> str:
    """Format the speed of the simulation at the knee of several cards."""
    if (found := result.get("speed")) is None:
        return ""
    lines = ["| card | requests/s at the knee | times real time | us of Python a request |", "|---|---|---|---|"]
    for row in found["knees"]:
        each = 1e6 * row["processor_s"] / found["requests"]
        speed = row["simulated_s"] / row["processor_s"]
        lines.append(f"| {row['card']}, {row['weights']} | {row['rate']:.1f} | {speed:,.0f} | {each:,.0f} |")
    short = 1e6 * found["only_come_and_go"]["processor_s"] / found["requests"]
    lines.append(
        f"\n{result['model']}, {found['target']}, lengths like those of Azure's conversations. A request of 16 tokens "
        f"with an answer of one token, alone in its engine, takes {short:,.0f} us. `{result['command']}` on "
        f"{result['environment']['processor']}, {record.made_at([result['environment']])}.\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("cpu", "gpu", "again", "h200"))
    parser.add_argument("--model", help="smollm2-135m on a CPU, random weights of llama-3.1-8b on a GPU")
    parser.add_argument("--requests", type=int, default=40, help="of each cell")
    parser.add_argument("--sweep", type=int, default=6, help="requests for each place of a level of the sweep")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no further cell begins")
    parser.add_argument("--hour", action="store_true", help="time the simulation of an hour like Azure's as well")
    parser.add_argument("--azure", type=Path, help="AzureLLMInferenceTrace_conv.csv: that hour")
    parser.add_argument("--keep", type=Path, help="folder for the decision log and the records of all runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = f"python benchmarks/plan/validation.py {options.where}"
    gpu = "h200/plan_cells.json"
    places = {"cpu": "cpu/plan_validation.json", "gpu": gpu, "again": gpu, "h200": "h200/plan_validation.json"}
    out = options.out or record.RESULTS / places[options.where]

    def keep(found: dict[str, Any]) -> None:
        record.write(out, {"command": command, "environment": record.environment(), **found})

    if options.where == "h200":
        keep(h200(options))
    elif options.where == "again":
        found = predict_again(GPU, options.keep, options.requests)
        keep(found | {"model": options.model or GPU_SHAPE, "predicted_on": record.environment()})
    else:
        measured(options, keep)


if __name__ == "__main__":
    main()
