"""Show the chats of ``transect demo``: a panel per chat in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


@dataclass
class Talk:
    """One chat of the demo. Times are seconds since its request was sent."""

    number: int
    question: str
    began: float = field(default_factory=time.perf_counter)
    text: str = ""
    tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    finish_reason: str | None = None

    def add(self, text: str) -> None:
        """Add a chunk. It counts as one token until the last chunk brings the exact count."""
        self.last_s = time.perf_counter() - self.began
        if self.first_s is None:
            self.first_s = self.last_s
        self.text += text
        self.tokens += 1

    @property
    def per_second(self) -> float:
        """Tokens per second after the first."""
        if self.first_s is None or self.last_s <= self.first_s:
            return 0.0
        return (self.tokens - 1) / (self.last_s - self.first_s)


@dataclass
class Gauges:
    """Values from the server's /metrics."""

    kv_usage: float = 0.0
    kv_peak: float = 0.0
    running: float = 0.0
    waiting: float = 0.0

    def take(self, metrics: str) -> None:
        """Read Prometheus' text format."""
        lines = [line.rsplit(" ", 1) for line in metrics.splitlines() if line and line[0] != "#"]
        values = {name.split("{")[0]: value for name, value in lines}  # those that are read have one label, the model's
        self.kv_usage = float(values.get("transect_kv_cache_usage_ratio", 0))
        self.kv_peak = max(self.kv_peak, self.kv_usage)
        self.running = float(values.get("transect_sequences_running", 0))
        self.waiting = float(values.get("transect_requests_waiting", 0))


class DemoView:
    """Show chats while they run; used as a context manager.

    In a terminal the picture is redrawn; elsewhere (a file, a CI log) each event is one line.

    Args:
        picture_width: width in characters of the picture to keep of the moment when the second chat ends.
    """

    def __init__(self, console: Console, talks: list[Talk], gauges: Gauges, picture_width: int | None = None) -> None:
        from rich.live import Live

        self._console, self._talks, self._gauges = console, talks, gauges
        self._picture_width = picture_width
        self.pictures: list[RenderableType] = []
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self._picture, console=console, refresh_per_second=8)

    def __enter__(self) -> DemoView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, talk: Talk) -> None:
        """Report that a talk has its first token."""
        if self._live is None:
            self._line(f"chat {talk.number}: first token after {talk.first_s:.2f} s")

    def finished(self, talk: Talk) -> None:
        """Report that a talk has ended."""
        ended = sum(each.finish_reason is not None for each in self._talks)
        if self._picture_width is not None and not self.pictures and ended >= min(2, len(self._talks)):
            self.pictures.append(self._picture_of(self._picture_width, 26))
        if self._live is None:
            text = " ".join(talk.text.split())
            self._line(f"chat {talk.number}: {talk.tokens} tokens, {talk.per_second:.0f} tok/s: {text[:60]}...")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        return self._picture_of(*self._console.size)

    def _picture_of(self, width: int, height: int) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table

        columns = max(1, min(4, width // 40))
        rows = -(-len(self._talks) // columns)
        lines = max(1, min(12, (height - 3) // rows - 2))
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        inside = width // columns - 4
        panels = []
        for talk in self._talks:
            body = _tail(talk.text, inside, lines)
            first = "waiting" if talk.first_s is None else f"first {talk.first_s:.2f} s"
            speed = f"{first} · {talk.per_second:.0f} tok/s"
            color = "green" if talk.finish_reason else "cyan" if talk.first_s is not None else "dim"
            panels.append(
                Panel(body, title=talk.question, subtitle=speed, border_style=color, height=lines + 2, padding=(0, 1))
            )
        for start in range(0, len(panels), columns):
            grid.add_row(*panels[start : start + columns])
        return Group(self._header(), grid)

    def _header(self) -> RenderableType:
        from rich.text import Text

        gauges = self._gauges
        begun = [talk for talk in self._talks if talk.first_s is not None]
        tokens = sum(talk.tokens for talk in self._talks)
        since = max((talk.last_s for talk in begun), default=0.0)
        total = tokens / since if since else 0.0
        filled = round(20 * gauges.kv_usage)
        bar = "█" * filled + "░" * (20 - filled)
        text = f"{total:.0f} tok/s together · {gauges.running:.0f} running · KV {bar} {gauges.kv_usage:.1%}"
        return Text(text, style="bold", no_wrap=True, overflow="ellipsis")


def _tail(text: str, width: int, lines: int) -> RenderableType:
    """Return the last lines of a text, wrapped."""
    from rich.text import Text

    wrapped: list[str] = []
    for paragraph in text.strip().splitlines():
        line = ""
        for word in paragraph.split():
            if line and len(line) + 1 + len(word) > width:
                wrapped.append(line)
                line = word
            else:
                line = f"{line} {word}".strip()
        wrapped.append(line)
    return Text("\n".join(wrapped[-lines:]), no_wrap=True, overflow="ellipsis")


def summary(talks: list[Talk], gauges: Gauges) -> Table:
    """Build the table shown at the end."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("chat")
    for name in ("tokens", "TTFT s", "tok/s", "total s"):
        table.add_column(name, justify="right")
    for talk in talks:
        row = (str(talk.tokens), f"{talk.first_s or 0:.2f}", f"{talk.per_second:.0f}", f"{talk.last_s:.2f}")
        table.add_row(talk.question, *row)
    tokens, seconds = sum(talk.tokens for talk in talks), max(talk.last_s for talk in talks)
    slowest = max(talk.first_s or 0 for talk in talks)
    table.add_section()
    table.add_row("together", str(tokens), f"{slowest:.2f}", f"{tokens / seconds:.0f}", f"{seconds:.2f}", style="bold")
    table.caption = f"KV cache at most {gauges.kv_peak:.1%} in use"
    return table
