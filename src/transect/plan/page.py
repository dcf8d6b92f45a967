"""A serving plan as one HTML page without scripts: the table, and curves of rate and cost against latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .report import NAMES, lines
from .serving import FleetPlan, SimulatedChoice

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 320, 70, 20, 34, 48
COLOURS = ("#0b7285", "#f08c00", "#c92a2a", "#5f3dc4", "#2b8a3e", "#495057")
STYLE = (
    "body{font-family:sans-serif;max-width:1240px;margin:2em auto;padding:0 1em;color:#212529}"
    "pre{overflow-x:auto;background:#f8f9fa;padding:1em;font-size:12px}svg{width:49%;min-width:420px}"
)
Curve = tuple[str, list[tuple[float, float]]]
"""A name and its points."""


def page_of(plan: FleetPlan, title: str) -> str:
    """Return the page."""
    pictures = []
    for name, words in NAMES.items():
        limit = plan.target.limit(name)
        curves = [(str(each.choice), _points(each, name)) for each in plan.answers]
        pictures.append(_picture(f"{words} p99, ms", "requests/s of an engine", curves, limit and 1e3 * limit))
    priced = [each for each in plan.answers if each.choice.card.name in plan.prices]
    if priced:
        curves = [(str(each.choice), _costs(plan, each)) for each in priced]
        pictures.append(_picture("TTFT p99, ms", "dollars per million output tokens", curves, None))
    text = escape("\n".join(lines(plan, title)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(pictures)}<pre>{text}</pre></body></html>\n"
    )


def _points(answer: SimulatedChoice, name: str) -> list[tuple[float, float]]:
    return [(each.rate, 1e3 * each.summary[name]["p99"]) for each in answer.points if each.summary[name]]


def _costs(plan: FleetPlan, answer: SimulatedChoice) -> list[tuple[float, float]]:
    """Return dollars per million output tokens, and TTFT p99, at each simulated rate of one engine."""
    hourly = plan.prices[answer.choice.card.name] * answer.choice.cards
    found = []
    for each in answer.points:
        tokens, ttft = each.summary["output_tokens_per_second"], each.summary["ttft"]
        if tokens and ttft:
            found.append((hourly / 3600 / tokens * 1e6, 1e3 * ttft["p99"]))
    return sorted(found)


def _picture(upward: str, across: str, curves: Sequence[Curve], limit: float | None) -> str:
    """Draw curves as one ``<svg>``; the vertical axis is logarithmic, and ``limit`` a dashed line on it."""
    values = [point for _, points in curves for point in points if point[1] > 0]
    if not values:
        return ""
    highs = [y for _, y in values] + ([limit] if limit else [])
    low, high = math.floor(math.log10(min(highs))), math.ceil(math.log10(max(highs)) + 1e-9)
    high = max(high, low + 1)
    most = max(x for x, _ in values) * 1.05

    def place(x: float, y: float) -> tuple[float, float]:
        up = (math.log10(max(y, 10.0**low)) - low) / (high - low)
        return (
            round(LEFT + x / most * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{escape(upward)}</text>',
        f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>',
    ]
    for power in range(low, high + 1):
        _, y = place(0, 10.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#e9ecef"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    for step in range(6):
        x, y = place(most * step / 5, 10.0**low)
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{most * step / 5:.3g}</text>')
    if limit:
        _, y = place(0, limit)
        parts.append(
            f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#495057" stroke-dasharray="5 4"/>'
        )
    for number, (name, points) in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join("{},{}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            left, top = place(x, y)
            shown = escape(f"{name}: {x:.3g}, {y:.4g}")
            parts.append(f'<circle cx="{left}" cy="{top}" r="3" fill="{colour}"><title>{shown}</title></circle>')
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 12 + 14 * number}" fill="{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])
