"""The tables and the JSON of ``transect memory``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..costs.memory.terms import Estimate


def dump(estimate: Estimate, facts: dict[str, Any]) -> None:
    """Print an account and its facts as JSON, in bytes."""
    from json import dumps

    print(dumps({**facts, **estimate.to_dict()}, indent=1))


def show(title: str, estimate: Estimate) -> None:
    """Print the terms of an account, and the moments at which they are held."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..costs.units import gib

    console = Console()
    terms = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    terms.add_column("term")
    terms.add_column("memory", justify="right", no_wrap=True)
    terms.add_column("what it is", overflow="fold")
    for term in (*estimate.terms, estimate.margin):
        if term.bytes:
            terms.add_row(term.name, gib(term.bytes), term.why)
    for term in estimate.host:
        terms.add_row(f"{term.name} (host)", gib(term.bytes), term.why)
    console.print(terms, highlight=False)
    phases = Table(title="held at the same time", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    phases.add_column("moment")
    phases.add_column("memory", justify="right", no_wrap=True)
    for phase in estimate.phases:
        phases.add_row(phase.name + (" (peak)" if phase is estimate.worst else ""), gib(phase.bytes))
    console.print(phases, highlight=False)
