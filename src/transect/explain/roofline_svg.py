"""A roofline as SVG, and as characters for a terminal. Both axes are logarithmic."""

from __future__ import annotations

import math
from html import escape

from ..costs.units import seconds_text
from .roofline import Point, Roofline

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 520, 80, 60, 40, 230
COLOURS = ("#0b7285", "#f08c00", "#c92a2a", "#5f3dc4", "#2b8a3e", "#495057")


class _Axes:
    """Logarithmic axes of the picture."""

    def __init__(self, found: Roofline) -> None:
        points = [point for point in found.points if point.intensity > 0 and point.rate > 0]
        ridges = [found.ridge(name) for name in found.flops_per_second]
        intensities = [point.intensity for point in points] + ridges
        self.x = math.floor(math.log10(min(intensities)) - 0.3), math.ceil(math.log10(max(intensities)) + 0.5)
        highest = max(found.flops_per_second.values())
        rates = [point.rate for point in points] + [10 ** self.x[0] * found.bytes_per_second]
        self.y = math.floor(math.log10(min(rates))), math.ceil(math.log10(highest) + 0.1)

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        """Return a point's coordinates as shares of the width and of the height, from the lower left corner."""
        across = (math.log10(intensity) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(rate) - self.y[0]) / (self.y[1] - self.y[0])
        return across, up


def svg(found: Roofline) -> str:
    """Return one self-contained ``<svg>`` element; each point has its figures in a ``<title>``."""
    axes = _Axes(found)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(intensity: float, rate: float) -> tuple[float, float]:
        across, up = axes.at(intensity, rate)
        return round(LEFT + across * inner_width, 1), round(TOP + (1 - up) * inner_height, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(found.device)}</text>',
    ]
    for power in range(axes.x[0], axes.x[1] + 1):
        x, _ = place(10.0**power, 10.0 ** axes.y[0])
        parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}" stroke="#e9ecef"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_power(power)}</text>')
    for power in range(axes.y[0], axes.y[1] + 1):
        _, y = place(10.0 ** axes.x[0], 10.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#e9ecef"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_rate(10.0**power)}</text>')
    middle = LEFT + inner_width / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">FLOPs per byte</text>')
    for name, rate in found.flops_per_second.items():
        start = place(10.0 ** axes.x[0], 10.0 ** axes.x[0] * found.bytes_per_second)
        ridge, end = place(found.ridge(name), rate), place(10.0 ** axes.x[1], rate)
        line = " ".join(f"{x},{y}" for x, y in (start, ridge, end))
        parts.append(f'<polyline class="roof" points="{line}" fill="none" stroke="#212529" stroke-width="1.5"/>')
        parts.append(f'<text x="{end[0] + 6}" y="{end[1] + 4}">{escape(name)}, {_rate(rate)}</text>')
    groups = list(dict.fromkeys(point.group for point in found.points))
    for point in found.points:
        if point.intensity > 0 and point.rate > 0:
            x, y = place(point.intensity, point.rate)
            colour = COLOURS[groups.index(point.group) % len(COLOURS)]
            said = escape(describe(found, point))
            parts.append(
                f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}" opacity="0.8"><title>{said}</title></circle>'
            )
    for index, group in enumerate(groups):
        y = HEIGHT - BOTTOM - 20 * (len(groups) - index)
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<circle cx="{WIDTH - RIGHT + 14}" cy="{y}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 26}" y="{y + 4}">{escape(group)}</text>')
    return "".join([*parts, "</svg>"])


def describe(found: Roofline, point: Point) -> str:
    """Describe a point in a sentence."""
    said = f"{point.group}: {point.name}, {point.intensity:.3g} FLOPs/byte, bound by {found.bound(point)}, "
    said += f"floor {seconds_text(point.roof)}"
    if point.seconds:
        said += f", measured {seconds_text(point.seconds)} ({point.roof / point.seconds:.0%} of the roof)"
    return said


def text(found: Roofline, columns: int = 76, rows: int = 18) -> str:
    """Draw the roofline with characters, and list the points below it."""
    axes = _Axes(found)
    grid = [[" "] * columns for _ in range(rows)]

    def put(intensity: float, rate: float, mark: str) -> None:
        across, up = axes.at(intensity, rate)
        if 0 <= across <= 1 and 0 <= up <= 1:
            grid[round((1 - up) * (rows - 1))][round(across * (columns - 1))] = mark

    for rate in found.flops_per_second.values():
        for column in range(columns):
            intensity = 10 ** (axes.x[0] + (axes.x[1] - axes.x[0]) * column / (columns - 1))
            put(
                intensity,
                min(rate, intensity * found.bytes_per_second),
                "-" if rate < intensity * found.bytes_per_second else "/",
            )
    marks = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    listed = []
    for index, point in enumerate(found.points):
        mark = marks[index % len(marks)]
        if point.intensity > 0 and point.rate > 0:
            put(point.intensity, point.rate, mark)
        listed.append(f"{mark}  {describe(found, point)}")
    roofs = ", ".join(f"{name} {_rate(rate)}" for name, rate in found.flops_per_second.items())
    head = f"{found.device}: {found.bytes_per_second / 1e9:.0f} GB/s, {roofs}"
    body = [f"{'FLOP/s' if not row else '      '} |{''.join(grid[row])}" for row in range(rows)]
    foot = f"       +{'-' * columns}"
    scale = f"        {_power(axes.x[0])}{'FLOPs per byte':^{columns - 12}}{_power(axes.x[1])}"
    return "\n".join([head, *body, foot, scale, "", *listed])


def _power(power: int) -> str:
    return f"{10.0**power:g}"


def _rate(rate: float) -> str:
    for unit, scale in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("kFLOP/s", 1e3)):
        if rate >= scale:
            return f"{rate / scale:.3g} {unit}"
    return f"{rate:.3g} FLOP/s"
