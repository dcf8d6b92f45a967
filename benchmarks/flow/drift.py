"""Measure the watch for drift: false alarms in windows without drift, and the share of planted drifts that it finds.

    python benchmarks/flow/drift.py [--windows 5000] [--trials 10] [--out FILE]

The texts are sentences of this project's pages, with the vectors of SmolLM2-135M (mean of hidden states). A prompt is a
sentence of the pages below ``serve``, ``measure`` and ``understand``, and its answer the sentence after it. Reference
and window are drawn without overlap. Planted drifts replace a share of a window: by sentences of other pages
(``train``, ``learn``, ``lab-notes``), by sentences in capitals, by prompts of two sentences, by refusals, and by
answers without their form. False alarms are counted in small windows (64 requests, reference of 128), because these are
many; planted drifts are searched with the shipped settings (256 and 512; 1 false alarm in 1,000 windows). ``--vectors``
keeps the vectors between runs. Writes benchmarks/results/cpu/drift.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import _paths  # noqa: F401
from benchmarks import record
from transect.flow.watch.drift import Baseline, DriftSettings, Embed, check_window
from transect.flow.watch.models import embed_here
from transect.flow.watch.records import Observation

OWN, OTHER = ("serve", "measure", "understand"), ("train", "learn", "lab-notes")
MOST_OWN, MOST_OTHER = 1400, 400
SHARES = (0.1, 0.25, 0.5, 1.0)
DIMENSIONS = 64
"""Principal components of the vectors that are kept, so that many windows can be tested."""
SORRY = "I'm sorry, but I can't help with that."
DRAWN = np.random.Generator


def sentences(folders: Sequence[str]) -> list[str]:
    """Return the sentences of the pages in some folders of ``docs/``, without code, tables and headings."""
    found: dict[str, None] = {}
    for folder in folders:
        for page in sorted((record.ROOT / "docs" / folder).glob("*.md")):
            text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
            parts = [part for part in text.split("\n\n") if not re.match(r"\s*[|#<*\-]", part)]
            for part in parts:
                plain = re.sub(r"\]\([^)]*\)|[\[`*]", "", " ".join(part.split()))
                found.update(dict.fromkeys(each for each in re.split(r"(?<=[.:]) (?=[A-Z])", plain) if len(each) > 20))
    return list(found)


def vectors_of(texts: Sequence[str], kept: Path | None) -> Embed:
    """Return a function that looks vectors up; those of these texts are computed here, unless a file has them."""
    if kept is not None and kept.exists():
        whole = np.load(kept)
    else:
        whole = embed_here("smollm2-135m")(texts).astype(np.float64)
        if kept is not None:
            np.save(kept, whole)
    centred = whole - whole.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    known = dict(zip(texts, (centred @ axes[:DIMENSIONS].T).astype(np.float32), strict=True))
    return lambda asked: np.stack([known[each] for each in asked])


def drawn(pool: Sequence[Observation], draw: DRAWN, first: int, second: int) -> tuple[list[Observation], ...]:
    """Draw two samples that do not overlap."""
    order = draw.permutation(len(pool))
    return [pool[i] for i in order[:first]], [pool[i] for i in order[first : first + second]]


def false_alarms(pool: Sequence[Observation], embed: Embed, windows: int) -> dict[str, Any]:
    """Count windows with an alarm among windows without drift, at the shipped rate and at ten times that."""
    draw = np.random.default_rng(0)
    least: list[float] = []
    settings = DriftSettings(window=64)
    for number in range(windows):
        reference, window = drawn(pool, draw, 128, settings.window)
        report = check_window(Baseline.of(reference, settings, embed), window, settings, embed, number=number)
        least.append(min(test.p / test.level for test in report.tests))
    rate = settings.false_alarms
    counts = {str(rate * times): int((np.array(least) <= times).sum()) for times in (1, 10, 50)}
    return {"windows": windows, "alarmed_at": counts}


Change = Callable[[Observation, DRAWN], Observation]


def planted(pool: Sequence[Observation], other: Sequence[str], capitals: Sequence[str]) -> dict[str, Change]:
    """Return the drifts: functions that change an observation."""

    def text(draw: DRAWN, texts: Sequence[str]) -> str:
        return texts[int(draw.integers(len(texts)))]

    prompts = [each.prompt for each in pool]
    change = dataclasses.replace
    return {
        "prompts of other pages": lambda each, draw: change(each, prompt=text(draw, other)),
        "answers of other pages": lambda each, draw: change(each, answer=text(draw, other)),
        "prompts in capitals": lambda each, draw: change(each, prompt=text(draw, capitals)),
        "prompts of two sentences": lambda each, draw: change(each, prompt=f"{each.prompt} {text(draw, prompts)}"),
        "refusals": lambda each, draw: change(each, answer=SORRY),
        "answers without their form": lambda each, draw: change(each, valid=False),
    }


def power(
    pool: Sequence[Observation], drifts: dict[str, Change], embed: Embed, trials: int
) -> dict[str, dict[str, float]]:
    """Return the share of windows with an alarm, by drift and by share of changed requests."""
    draw = np.random.default_rng(1)
    settings = DriftSettings()
    found: dict[str, dict[str, float]] = {}
    for name, change in drifts.items():
        # Two joined sentences have no vector of their own here: their drift is one of lengths.
        looked_up = None if name == "prompts of two sentences" else embed
        found[name] = {}
        for share in SHARES:
            alarms = 0
            for number in range(trials):
                reference, window = drawn(pool, draw, 512, settings.window)
                changed = draw.permutation(len(window))[: round(share * len(window))]
                for place in changed:
                    window[place] = change(window[place], draw)
                baseline = Baseline.of(reference, settings, looked_up)
                alarms += bool(check_window(baseline, window, settings, looked_up, number=number).alarms)
            found[name][str(share)] = alarms / trials
            print(name, share, found[name][str(share)], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=5000)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "drift.json")
    arguments = parser.parse_args()
    draw = np.random.default_rng(2)
    own = sentences(OWN)[:MOST_OWN]
    other = [str(each) for each in draw.permutation(sentences(OTHER))[:MOST_OTHER]]
    capitals = [str(each).upper() for each in draw.permutation(own)[:MOST_OTHER]]
    began = time.perf_counter()
    embed = vectors_of([*dict.fromkeys([*own, *other, *capitals, SORRY])], arguments.vectors)
    seconds = time.perf_counter() - began
    pool = [Observation(a, b, form="json") for a, b in itertools.pairwise(own)]
    result = {
        "command": "python benchmarks/flow/drift.py",
        "sentences": {"own": len(own), "other": len(other)},
        "vectors_s": round(seconds, 1),
        "trials": arguments.trials,
        "false_alarms": false_alarms(pool, embed, arguments.windows),
        "found": power(pool, planted(pool, other, capitals), embed, arguments.trials),
    }
    record.write(arguments.out, result | {"environment": record.environment()})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
