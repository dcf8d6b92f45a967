"""What ``transect tune`` found on the H200: the rule's time and the best's, and what each knob is worth."""

from __future__ import annotations

import json

import record

RESULT = record.RESULTS / "h200" / "ops_tuning.json"


def table(least: float = 1.01) -> str:
    """The searches that gained ``least`` or more, and how many did not.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    kept = json.loads(RESULT.read_text())
    lines = ["| launcher | shape | tried | rule µs | best µs | gain | worth of each knob |"]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    better = [found for found in kept["searches"] if found["gain"] and found["gain"] >= least]
    for found in sorted(better, key=lambda found: (found["launcher"], -found["gain"])):
        rule, best = found["trials"][0]["seconds"], found["best"]["seconds"]
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
    where = kept["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    equal = len(kept["searches"]) - len(better)
    origin = f"`transect tune` on one {kept['device']}, {versions}, commit {where['commit']}; at {equal} more shapes "
    return "\n".join(lines) + "\n\n" + origin + f"nothing gained {least - 1:.0%}, and the rule stays.\n"
