"""Step times of ``costs/serving.py`` fitted on recorded steps of one H200, and held against others. Needs no GPU.

    python benchmarks/engine/serving_steps.py [--out ...]

Fitted on: decode steps and prefills of Llama-3.1-8B and Qwen3-0.6B in bfloat16 (``engine_*.json``); the time of sums
over its measured time on decode steps of the 8B on two GPUs (``tp_llama-3.1-8b.json``). Each packed format then has
three coefficients of its own, those of its products, from its decode steps of 1, 64 and 256 rows (``formats.json``).
Held out: Llama-3.3-70B on two GPUs, the 8B in bfloat16 on another day, packed formats at other numbers of rows and with
an fp8 cache. The result has every step: measured, predicted, and whether it was fitted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.workload import throughput_protocol
from transect.costs.fitting import fit_efficiency
from transect.costs.floors import Rates, step_floor
from transect.costs.links import MeasuredLinks
from transect.costs.machine import Machine
from transect.costs.model import Row
from transect.costs.presets import preset
from transect.costs.serving import Efficiency, ServingSteps, batch_seconds, steps_on
from transect.costs.steps import StepLoad
from transect.costs.storage import Storage, storage_for
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

RATES = Rates(4.35e12, 750e12, "H200, measured")
"""As in ``engine/gpu.py``."""
PREFILL = 512, 16, 16
"""Tokens of a prompt, prompts of a step, steps of a recorded prefill."""
FREE = ("few", "weights", "products", "norm", "keys", "moved", "step", "layer", "row")
START = Efficiency(
    few=0.9, weights=0.8, products=0.8, norm=3.0, keys=0.8, pairs=0.6, moved=0.8, step=1e-4, layer=3e-6, row=1e-6
)
"""Coefficients that a fit begins with."""
OWN = ("few", "weights", "products")
"""Coefficients of a packed format."""
GROUP = 128
"""Logits behind two numbers of a sum."""
LONGEST = 4096


class Recorded(NamedTuple):
    """One recorded step."""

    name: str
    model: str
    format: str
    load: StepLoad
    seconds: float
    storage: Storage
    links: MeasuredLinks | None = None

    def steps(self, efficiency: Efficiency) -> ServingSteps:
        """Make the step times of its model and layout."""
        if self.links is None:
            return ServingSteps(PRESETS[self.model], RATES, efficiency, self.storage)
        layout = RankLayout(tensor=2)
        return ServingSteps(PRESETS[self.model], RATES, efficiency, self.storage, layout, self.links.among(2))

    def predicted(self, efficiency: Efficiency) -> float:
        """Predict its seconds."""
        return self.steps(efficiency).seconds(self.load)


def sections(name: str) -> dict[str, Any]:
    """Read the sections of a recorded result."""
    found = json.loads((record.RESULTS / "h200" / f"{name}.json").read_text())["sections"]
    return {key: section["result"] for key, section in found.items()}


def decodes(name: str, model: str, form: str, prefix: str, ranks: int = 1) -> Iterator[Recorded]:
    """Yield the decode steps of a result whose keys begin with ``prefix`` and end with the number of rows."""
    found = sections(name)
    storage = storage_for(2, None if form.startswith("bf16") else form.partition("-")[0])
    if form.endswith("-kv8"):
        storage = dataclasses.replace(storage, kv=8)
    links = None
    if ranks > 1:
        sums = found[f"tp{ranks} links"]
        best = {int(size): min(seconds, sums["own"].get(size, 1.0)) for size, seconds in sums["library"].items()}
        links = MeasuredLinks(best, GROUP)
    for key, row in found.items():
        batch = key.removeprefix(prefix)
        if key.startswith(prefix) and batch.isdigit():
            length = length_of(model, int(batch), row["floor_s"], storage, ranks)
            load = StepLoad.of([(length - 1, 1)] * int(batch))
            yield Recorded(f"{key} ({name})", model, form, load, row["step_s"]["median"], storage, links)


def length_of(model: str, rows: int, floor: float, storage: Storage, ranks: int) -> int:
    """Find the mean length of the sequences of a step from its recorded floor."""
    low, high = 1, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        least = step_floor(PRESETS[model], [Row(1, middle)] * rows, RATES, storage, ranks=ranks).seconds
        low, high = (middle, high) if least <= floor else (low, middle)
    return low


def prefill(name: str, model: str) -> Recorded:
    """Return one step of a recorded prefill."""
    tokens, prompts, steps = PREFILL
    seconds = sections(name)["prefill"]["seconds"]["median"] / steps
    return Recorded(f"prefill ({name})", model, "bf16", StepLoad.of([(0, tokens)] * prompts), seconds, Storage())


def dense() -> list[Recorded]:
    """List the steps that the coefficients of bfloat16 are fitted on."""
    found = []
    for model in ("llama-3.1-8b", "qwen3-0.6b"):
        found += [*decodes(f"engine_{model}", model, "bf16", "decode "), prefill(f"engine_{model}", model)]
    return found


def fitted() -> tuple[Efficiency, list[Recorded]]:
    """Fit bfloat16 on one GPU, and sums on two; return the coefficients and the steps that they are from."""
    one, two = dense(), list(decodes("tp_llama-3.1-8b", "llama-3.1-8b", "bf16", "tp2 decode ", 2))
    known = fit_efficiency(START, [(each.steps, each.load, each.seconds) for each in one], FREE)
    return fit_efficiency(known, [(each.steps, each.load, each.seconds) for each in two], ("sums",)), one + two


def rows_of(steps: list[Recorded], known: Efficiency, used: bool) -> list[dict[str, Any]]:
    """Compare steps with their predictions."""
    found = []
    for each in steps:
        seconds = each.predicted(known)
        facts = {"step": each.name, "model": each.model, "format": each.format, "fitted": used}
        found.append({**facts, "measured_s": each.seconds, "predicted_s": seconds, "error": seconds / each.seconds - 1})
    return found


def packed(known: Efficiency, form: str) -> tuple[Efficiency, list[dict[str, Any]]]:
    """Fit the products of a packed format, and compare its steps."""
    steps = list(decodes("formats", "llama-3.1-8b", form, f"decode {form} "))
    train = [each for each in steps if each.load.rows in (1, 64, 256)]
    own = fit_efficiency(known, [(each.steps, each.load, each.seconds) for each in train], OWN)
    others = [each for each in steps if each not in train]
    return own, [*rows_of(train, own, True), *rows_of(others, own, False)]


GROUPS = {
    "bfloat16, fitted": ("bf16", True),
    "Llama-3.3-70B on two GPUs, and the 8B on another day": ("bf16", False),
    "whole runs of 256 requests, on one GPU and on two": ("bf16 protocol", False),
    "the steps of bfloat16 from the data sheet's rates and links": ("bf16 sheet", False),
    "fp8, fitted": ("fp8", True),
    "fp8, other numbers of rows": ("fp8", False),
    "fp8 with a cache in fp8": ("fp8-kv8", False),
    "int4, fitted": ("int4", True),
}


def table(result: dict[str, Any]) -> str:
    """Show the errors of each group of steps."""
    lines = ["| steps | number | mean error | largest error |", "|---|---|---|---|"]
    for name, (form, used) in GROUPS.items():
        errors = [row["error"] for row in result["steps"] if row["format"] == form and row["fitted"] is used]
        worst, mean = max(errors, key=abs), sum(map(abs, errors)) / len(errors)
        lines.append(f"| {name} | {len(errors)} | {mean:.1%} | {worst:+.1%} |")
    made = record.made_at([result["environment"]])
    return "\n".join(lines) + f"\n\n`{result['command']}` over recorded steps of one and two H200s, {made}.\n"


def protocols(known: Efficiency) -> list[dict[str, Any]]:
    """Compare whole runs of the throughput protocol, 256 requests of many lengths in about 1,000 steps."""
    lengths = [(len(each.prompt), each.output_tokens) for each in throughput_protocol()]
    sums = next(decodes("tp_llama-3.1-8b", "llama-3.1-8b", "bf16", "tp2 decode ", 2)).links
    assert sums is not None
    runs = [(f"engine_{model}", model, 1) for model in ("llama-3.1-8b", "qwen3-8b", "qwen3-0.6b")]
    found = []
    for name, model, ranks in (*runs, ("tp_llama-3.1-8b", "llama-3.1-8b", 2)):
        section = sections(name)["throughput" if ranks == 1 else f"tp{ranks} throughput"]
        layout = RankLayout(tensor=ranks)
        links = sums.among(ranks) if ranks > 1 else None
        seconds = batch_seconds(ServingSteps(PRESETS[model], RATES, known, None, layout, links), lengths)
        measured = section["seconds"]["median"]
        facts = {"step": f"protocol ({name})", "model": model, "format": "bf16 protocol", "fitted": False}
        found.append({**facts, "measured_s": measured, "predicted_s": seconds, "error": seconds / measured - 1})
    return found


def from_the_sheet() -> list[dict[str, Any]]:
    """Compare the recorded steps of bfloat16 with predictions from the preset of an H200: no measured rate or link."""
    machine, found = Machine.of(preset("h200")), []
    two = [*decodes("tp_llama-3.1-8b", "llama-3.1-8b", "bf16", "tp2 decode ", 2)]
    for each in [*dense(), *two, *decodes("tp_llama-3.3-70b", "llama-3.3-70b", "bf16", "tp2 decode ", 2)]:
        layout = RankLayout(tensor=1 if each.links is None else 2)
        seconds = steps_on(machine, PRESETS[each.model], each.storage, layout).seconds(each.load)
        facts = {"step": each.name, "model": each.model, "format": "bf16 sheet", "fitted": False}
        found.append({**facts, "measured_s": each.seconds, "predicted_s": seconds, "error": seconds / each.seconds - 1})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "serving_steps.json")
    options = parser.parse_args()
    known, train = fitted()
    held = [
        *decodes("tp_llama-3.3-70b", "llama-3.3-70b", "bf16", "tp2 decode ", 2),
        *decodes("formats", "llama-3.1-8b", "bf16", "decode bf16 "),
    ]
    found = [*rows_of(train, known, True), *rows_of(held, known, False), *protocols(known), *from_the_sheet()]
    forms = {"bf16": dataclasses.asdict(known)}
    for form in ("fp8", "int4"):
        own, rows = packed(known, form)
        found += rows
        forms[form] = {name: getattr(own, name) for name in OWN}
        if form == "fp8":
            found += rows_of(list(decodes("formats", "llama-3.1-8b", "fp8-kv8", "decode fp8-kv8 ")), own, False)
    for row in found:
        used = "fitted" if row["fitted"] else "held out"
        shown = f"{1e3 * row['measured_s']:8.3f} ms, predicted {1e3 * row['predicted_s']:8.3f}, {row['error']:+.1%}"
        print(f"{row['step'] + ' ' + row['format']:44s} {shown}  {used}")
    print(forms)
    errors = {
        name: max(abs(row["error"]) for row in found if row["fitted"] is used and row["format"] == "bf16")
        for name, used in (("fitted", True), ("held_out", False))
    }
    print({name: f"{error:.1%}" for name, error in errors.items()})
    result = {"command": "python benchmarks/engine/serving_steps.py", "environment": record.environment()}
    record.write(options.out, {**result, "coefficients": forms, "largest_errors_bf16": errors, "steps": found})


if __name__ == "__main__":
    main()
