"""Sentences on the server's page: frames of long answers, and the cost of the alternatives of tokens."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import record


def frames(result: dict[str, Any]) -> str:
    """Say how long frames took while an answer arrived and while a reader scrolled through it."""
    said = []
    for kind, what in (("arriving", "while it arrives"), ("scrolling", "while a reader scrolls")):
        rounds = [each[kind] for each in result["rounds"]]
        middle = statistics.median(each["median_ms"] for each in rounds)
        p99 = statistics.median(each["p99_ms"] for each in rounds)
        longest = max(each["longest_ms"] for each in rounds)
        said.append(f"{middle:.1f} ms at the median, {p99:.1f} ms at p99, {longest:.0f} ms at most {what}")
    return (
        f"Frames of an answer of {result['tokens']:,} tokens take {'; '.join(said)} ({len(result['rounds'])} rounds, "
        f"Chromium {result['chromium'].split('.')[0]} on 2 cores of an {result['processor']}, "
        f"{record.made_at([result])}).\n"
    )


def probabilities(result: dict[str, Any]) -> str:
    """Say the share of the tokens per second that remains with the alternatives of each token."""
    said = [
        f"{row['ratio']['mean']:.2f} ({row['ratio']['low']:.2f} to {row['ratio']['high']:.2f}) at {row['chats']} "
        f"{'chat' if row['chats'] == 1 else 'chats'}"
        for row in result["rows"]
    ]
    return (
        f"The page asks for the alternatives of each token. Tokens per second with them, over those without, on a CPU: "
        f"{', '.join(said)} (`{result['command']}`, {result['rows'][0]['tokens_per_s_with']['runs']} pairs of runs, "
        f"{result['processor']}, {record.made_at([result])}).\n"
    )
