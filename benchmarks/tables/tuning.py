"""Results of ``transect tune`` on the H200: the rule's time and the best's, and the gain of each knob."""

from __future__ import annotations

import json
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

RESULTS = record.RESULTS / "h200"
"""Each run's findings are a file here: ``ops_tuning*.json``."""


def table(least: float = 1.01) -> str:
    """Format the searches that gained ``least`` or more, and the number of those that did not.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("ops_tuning*.json"))]
    if not runs:
        raise FileNotFoundError(f"no ops_tuning*.json in {RESULTS}")
    searches = [found for run in runs for found in run["searches"]]
    lines = ["| launcher | shape | tried | rule µs | best µs | gain | effect of each parameter |"]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    better = [found for found in searches if found["gain"] and found["gain"] >= least]
    for found in sorted(better, key=lambda found: (found["launcher"], -found["gain"])):
        rule = (found.get("finals") or found["trials"])[0]["seconds"]
        best = found["best"]["seconds"]
        config = found["best"]["config"]
        worth = ", ".join(
            f"{name} {found['default'][name]} → {config[name]}: {share - 1:.1%}"
            for name, share in found["worth"].items()
            if share and config[name] != found["default"][name]
        )
        lines.append(
            f"| {found['launcher']} | {found['case']} | {len(found['trials'])} | {rule * 1e6:.2f} | {best * 1e6:.2f} | "
            f"{found['gain'] - 1:.1%} | {worth} |"
        )
    others = dict.fromkeys(found["launcher"] for found in searches if found not in better)
    equal = (
        f"At {len(searches) - len(better)} more shapes of {', '.join(others)} nothing gained {least - 1:.0%}, and the "
    )
    return "\n".join(lines) + "\n\n" + "".join(_origin(run) for run in runs) + equal + "rule stays.\n"


def _origin(run: dict[str, Any]) -> str:
    where = run["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    return f"`transect tune` on one {run['device']}, {versions}, {record.made_at([where])}.\n"
