"""Draw the screen of ``transect demo`` as an SVG picture."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 160
"""Characters in a line."""
_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def svg_of(parts: list[RenderableType], title: str) -> str:
    """Render a terminal window with these parts below each other as SVG. It loads no font from the network."""
    from rich.console import Console

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for part in parts:
        console.print(part)
    return _FONT.sub("", console.export_svg(title=title)).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
