"""A backward pass as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from ...costs.units import seconds_text
from .graph import Backward, Node, Saved, Total

LAYER = re.compile(r"(.*?\b\d+)(\.|$)")


def lines(backward: Backward, *, every: bool = False) -> Iterator[str]:
    """Yield lines for nodes in order, totals by kind and by module, and memory.

    Layers that look like the one before them are one line each, unless ``every`` node is wanted.
    """
    head = ("", "node", "module", "saved", "held", "time", "what it saved")
    yield from _table(head, list(_rows(backward.nodes, every)), right=(0, 3, 4, 5))
    yield ""
    yield "held: activations that the graph holds when the node starts; weights are there anyway"
    for title, totals in (
        ("by kind", backward.totals()),
        ("by module", backward.totals(lambda node: re.sub(r"\d+", "*", node.module) or "(no module)")),
    ):
        if title == "by module" and len(totals) == 1:
            continue
        yield ""
        yield from _table(
            (title, "nodes", "saved", "time", "share"), [_total_cells(t, backward) for t in totals], right=(1, 2, 3, 4)
        )
    inside = sum(node.seconds for node in backward.nodes)
    yield ""
    total = seconds_text(backward.seconds)
    yield f"{len(backward.nodes)} nodes in {seconds_text(inside)}, with the time between them {total}"
    yield (
        f"saved: {size(backward.activation_bytes)} of activations, {size(backward.peak)} of them at the peak; "
        f"{size(backward.weight_bytes)} of weights, which cost nothing more"
    )
    hidden = sum(node.hidden for node in backward.nodes)
    if hidden:
        yield f"{hidden} more were saved by hooks (activation checkpointing, offloading): their size is not known"


def size(count: int) -> str:
    """Format a number of bytes, in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def _rows(nodes: Sequence[Node], every: bool) -> Iterator[Sequence[str]]:
    index = 0
    before: tuple[str, list[str]] = "", []
    for layer, group in groupby(nodes, _layer):
        members = list(group)
        names = [node.name for node in members]
        if layer and names == before[1] and not every:
            label = f"{index}-{index + len(members) - 1}", f"{len(members)} nodes as in {before[0]}", layer
            yield *label, *_numbers(members), ""
        else:
            for at, node in enumerate(members, index):
                saved = [*map(_saved_text, node.saved), *["behind a hook"] * node.hidden]
                yield str(at), node.name, node.weight or node.module, *_numbers([node]), ", ".join(saved)
            before = layer, names
        index += len(members)


def _numbers(nodes: Sequence[Node]) -> tuple[str, str, str]:
    """Return the columns for bytes saved, bytes held at the start, and time."""
    saved = sum(node.bytes("activation") for node in nodes)
    return _bytes(saved), size(nodes[0].held), seconds_text(sum(node.seconds for node in nodes))


def _layer(node: Node) -> str:
    """Return ``layers.3`` for ``layers.3.mlp.up``; "" outside of numbered modules."""
    found = LAYER.match(node.module)
    return found[1] if found else ""


def _bytes(count: int) -> str:
    return size(count) if count else ""


def _saved_text(saved: Saved) -> str:
    shape = "x".join(map(str, saved.shape)) or "scalar"
    if saved.kind == "weight":
        return f"weight {shape}"
    return f"{shape} {saved.dtype}" if saved.counted else f"{shape} again"


def _total_cells(total: Total, backward: Backward) -> tuple[str, ...]:
    inside = sum(node.seconds for node in backward.nodes) or 1.0
    share = f"{total.seconds / inside:.0%}"
    return total.name, str(total.nodes), _bytes(total.bytes), seconds_text(total.seconds), share


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> Iterator[str]:
    """Align columns; those in ``right`` are right-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = zip(row, widths, strict=True)
        yield "  ".join(c.rjust(w) if column in right else c.ljust(w) for column, (c, w) in enumerate(cells)).rstrip()
