"""The recorded figures of searches as Markdown (``benchmarks/engine/search.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import _paths  # noqa: F401
from benchmarks import record


def tables(results: Iterable[dict[str, Any]]) -> str:
    """Format the results of several machines."""
    return "\n\n".join(map(table, results))


def table(result: dict[str, Any]) -> str:
    """Format the measured parts, and the command that made them."""
    parts = {"speed": _speed, "tasks": _tasks, "server": _server}
    found = [line for name, make in parts.items() if name in result for line in make(result[name])]
    machine = result["environment"]
    where = f"{result['device']}, random weights" if result["dummy"] else machine["processor"]
    return "\n".join([*found, f"`{result['command']}`: {where}, commit {record.cited(machine['commit'])}."])


def stopping(result: dict[str, Any]) -> str:
    """Format the replay of votes that stop early (``benchmarks/engine/search_stopping.py``)."""
    lines = _head("task", "certainty", "answer of the full vote", "accuracy", "of the full vote", "tokens")
    for family, found in result["families"].items():
        for certainty, each in found["certainties"].items():
            shares = (f"{each[name]:.1%}" for name in ("equal", "accuracy", "full_accuracy"))
            lines.append(_row(family, certainty, *shares, f"{each['share_of_tokens']:.0%}"))
    sizes = {(each["tasks"], each["n"], each["orders"]) for each in result["families"].values()}
    tasks, n, orders = max(sizes)
    machine = result["environment"]
    return "\n".join([
        *lines, "",
        f"`{result['command']}`: {tasks} tasks of each kind, {n} answers of {result['model']} to each, in {orders} "
        f"orders; {machine['processor']}, commit {record.cited(machine['commit'])}.",
    ])  # fmt: skip


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]


def _share(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['accuracy']:.0%} ({low:.0%} to {high:.0%})"


def _spread(found: dict[str, Any], form: str) -> str:
    return f"{found['median']:{form}} ({found['min']:{form}} to {found['max']:{form}})"


def _speed(speed: dict[str, Any]) -> list[str]:
    work = f"{speed['count']} answers of {speed['tokens']} tokens to a prompt of {speed['prompt_tokens']}"
    lines = _head(work, "tokens/s", "most KV blocks")
    for name, title in (("branches", "branches of a search"), ("requests", "requests with the prefix cache")):
        lines.append(_row(title, _spread(speed[name]["tokens_per_s"], ",.0f"), speed[name]["most_kv_blocks"]))
    return [*lines, "", f"In turns: {_spread(speed['branches_over_requests'], '.2f')} times as fast.", ""]


def _tasks(families: dict[str, Any]) -> list[str]:
    lines = _head("task", "method", "accuracy (95%)", "guessing", "one greedy answer", "difference", "report", "tokens")
    for family, methods in families.items():
        for title, found in methods.items():
            if isinstance(found, dict):
                low, high = (f"{100 * value:+.0f}" for value in found["difference"])
                shares = _share(found["searched"]), f"{found['guess']:.0%}", _share(found["single"])
                end = f"{low} to {high} points", found["verdict"], f"{found['tokens']:,}"
                lines.append(_row(family, title, *shares, *end))
    said = (f"{family} {methods['adaptive_share_of_tokens']:.0%}" for family, methods in families.items())
    return [*lines, "", f"Tokens of the adaptive vote as a share of the majority's: {', '.join(said)}.", ""]


def _server(server: dict[str, Any]) -> list[str]:
    lines = _head("over HTTP, one task at a time", "tasks", "seconds", "accuracy (95%)", "time, Transect over optillm")
    for title, found in server.items():
        for name in ("transect", "optillm"):
            if isinstance(found, dict) and name in found:
                ratio = found.get("transect_over_optillm")
                cell = f"{ratio['median']:.2f}" if ratio is not None and name == "transect" else ""
                seconds, share = _spread(found[name]["seconds"], ".1f"), _share(found[name]["searched"])
                lines.append(_row(f"{title}: {name}", found[name]["tasks"], seconds, share, cell))
    said = "Seconds are of a round over these tasks; the accuracy is that of all rounds, which have different tasks."
    if "mixture of 3" in server:
        said += " optillm's mixture also has the model write a critique of the proposals."
    return [*lines, "", said, ""]
