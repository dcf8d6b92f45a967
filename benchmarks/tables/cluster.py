"""Tables of fleets: drills, predictions, two hosts, and the cost of the layer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import record
from transect.plan.drills import DRILLS as DRILL_TITLES

DRILLS = {
    "kills": "{kills} kills of engines and actors, one at a time",
    "stopped": "an engine stopped",
    "host": "a replica's host stopped",
    "roll": "a roll; never fewer than {fewest_ready} replicas",
    "scale": "to 4 replicas, to 2, to 3",
    "cancelled": "scale-down while clients leave; gone after {gone_s:.1f} s",
    "controller": "Ray's controller killed; back after {back_s:.1f} s",
    "blind": "Ray's controller stopped; alarm after {raised_s:.1f} s",
    "metrics": "metrics cut off (the router stopped); blind after {blind_s:.1f} s, and the number stayed",
    "node": "a node lost, with {replicas_lost} replica",
    "router": "the router killed; back after {back_s:.1f} s",
}
"""Rows of the table of drills, with values of their results."""


def _spread(value: Mapping[str, Any], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"


def _made(result: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]] = ()) -> str:
    """Name the machine and the commit. ``rounds``: what has a load average, taken before it began."""
    loads = [each["load_average"] for each in rounds if "load_average" in each]
    cores = f"{result['cores']} cores"
    if len(loads) < len(rounds):
        cores += ", whose other work was not recorded"
    elif loads:
        least, most = min(loads), max(loads)
        cores += f", load average before {'the run' if len(loads) == 1 else 'the rounds'} {least:.1f}"
        cores += f" to {most:.1f}" if most - least >= 0.1 else ""
    made = record.made_at([each if "commit" in each else result for each in rounds or [result]])
    return f"On {result['processor']} ({cores}), {made}."


def drills(result: Mapping[str, Any]) -> str:
    """Render the drills of a fleet on Ray."""
    lines = ["| drill | answers | dropped | other bytes | longest pause |", "|---|---|---|---|---|"]
    for name, text in DRILLS.items():
        if name in result["drills"]:
            each = result["drills"][name]
            counts = f"{each['answers']} | {each['dropped']} | {each['differing']} | {each['longest_gap_s']:.2f} s"
            lines.append(f"| {text.format(**each)} | {counts} |")
    engine = "a model" if result["real"] else "an engine that makes tokens up (all else is the shipping code)"
    return "\n".join([
        *lines, "",
        f"`{result['command']}`: three replicas of {engine} on a Ray cluster of one machine with six clients. Dropped "
        f"answers are those that ended with an error. {_made(result, list(result['drills'].values()))}",
    ])  # fmt: skip


def predicted(result: Mapping[str, Any]) -> str:
    """Render predictions of drills beside their measurements."""
    lines = [
        "| drill | p99, predicted | measured | added, predicted | measured "
        "| replica-seconds lost, predicted | measured | dropped, predicted | measured | rounds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (title, *_) in DRILL_TITLES.items():
        if name in result["drills"]:
            rounds = result["drills"][name]
            pair = [_medians([each[side] for each in rounds]) for side in ("predicted", "measured")]
            cells = [f"{side['p99']:.2f} s" for side in pair] + [f"{side['added_p99']:+.2f} s" for side in pair]
            cells += [f"{side['lost']:.1f}" for side in pair] + [f"{side['dropped']:.0f}" for side in pair]
            cells.append(str(len(rounds)))
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([
        *lines, "",
        f"`{result['command']}`: three replicas on Ray with engines that make tokens up, {result['rate']:g} requests a "
        "second, which is more than two replicas can serve; medians of rounds, each with its own prediction. "
        f"{_made(result, [each for rounds in result['drills'].values() for each in rounds])}",
    ])  # fmt: skip


def _medians(effects: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in effects) for name in effects[0]}


def two_hosts(result: Mapping[str, Any]) -> str:
    """Render the runs on two hosts in network namespaces."""
    lines = []
    if "collectives" in result:
        found = result["collectives"]["all_reduce_s"]
        cells = (f"{int(size):,} bytes in {1e3 * fast:.2f} ms and {1e3 * found['slow'][size]:.2f} ms"
                 for size, fast in found["fast"].items())  # fmt: skip
        lines.append(f"* all-reduce over the fast and the slow link: {', '.join(cells)}")
    if "serve" in result:
        each = result["serve"]
        lines.append(
            f"* one model over both hosts: an answer took {each['fast_s']:.1f} s, and with the same text "
            f"{each['slow_s']:.1f} s on the slow link; with the link cut the request ended with an error after "
            f"{each['cut_s']:.0f} s"
        )
    if "train" in result:
        each = result["train"]
        times = ", ".join(f"{value['seconds']:.0f} s ({name})" for name, value in each.items())
        lines.append(
            f"* {len(each['fast']['losses'])} training steps of two ranks: the same losses in all cases; {times}"
        )
    if "fleet" in result:
        each = result["fleet"]
        lines.append(
            f"* a fleet whose link is cut while streams run: {each['same']} of {each['of']} answers had the same "
            f"bytes, {each['moved']} of them moved; the longest pause was {each['longest_gap_s']:.1f} s, of which 2 s "
            f"are `lost_after_s`; the replica was back {each['back_s']:.1f} s after the link"
        )
    link = result["link"]
    lines += [
        "",
        f"`{result['command']}`: slow is `tc {link['slow']}`. {_made(result, [result])}",
    ]
    return "\n".join(lines)


def ray_layer(result: Mapping[str, Any]) -> str:
    """Render what a fleet on Ray adds to a server."""
    rows = {"alone": "`transect serve`", "fleet": "a fleet on Ray", "proxy": "a fleet through Ray Serve's proxy"}
    lines = [
        f"| | first token at one stream, ms | tokens/s of {result['streams']} streams | added, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, text in rows.items():
        if name in result:
            each = result[name]
            more, ratio = result.get(f"{name}_first_token_ms_more"), result.get(f"{name}_tokens_per_s_ratio")
            added = " | ".join(("", "") if more is None or ratio is None else (_spread(more), _spread(ratio, 3)))
            lines.append(
                f"| {text} | {_spread(each['first_token_ms'])} | {_spread(each['tokens_per_s'], 0)} | {added} |"
            )
    return "\n".join([
        *lines, "",
        f"`{result['command']}`: an engine without a model, whose steps take {1e3 * result['step_s']:.0f} ms; median "
        f"and extremes of {result['alone']['first_token_ms']['runs']} rounds. {_made(result, [result])}",
    ])  # fmt: skip
