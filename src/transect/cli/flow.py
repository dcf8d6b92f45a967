"""``transect flow``: the life of a model, from data to a release and back."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import flow_watch

if TYPE_CHECKING:
    from ..flow.chain import PlannedStep

application = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

FlowFile = Annotated[Path, typer.Argument(help="A flow's TOML file; see docs/train/flow.md.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE in place of the file's, such as release.share=0.2.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@application.callback()
def flow() -> None:
    """Make, judge, release and watch a model, with a record of every step."""


@application.command()
def run(
    file: FlowFile,
    plan: Annotated[bool, typer.Option("--plan", help="Only list what would be done, and why.")] = False,
    settings_: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Run the steps whose inputs have changed; run it again to resume. Exit 1 if a step does not pass."""
    import json
    from dataclasses import asdict

    from ..flow.chain import STOPPED, FlowChain
    from ..flow.picture import chain_state
    from ..flow.settings import FlowConfig
    from ..flow.steps.step import InterruptedStep

    config = FlowConfig.from_toml(file, settings_ or [])
    asked: list[int] = []
    tell = lambda line: print(f"transect: {line}", file=sys.stderr, flush=True)  # noqa: E731 (one line)
    chain = FlowChain(config, tell=tell, should_stop=lambda: bool(asked))
    if plan:
        planned = chain.plan()
        print(json.dumps([asdict(each) for each in planned], indent=1)) if as_json else _print_plan(planned)
        return 0

    def stop(signum: int, _frame: Any) -> None:
        asked.append(signum)
        if len(asked) > 2:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        states = chain.run()
    except InterruptedStep:
        print(f"stopped; continue with transect flow run {file}")
        return 128 + asked[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if as_json:
        print(json.dumps(chain_state(config.folder), indent=1))
    else:
        _draw(config.folder)
    return int(any(state.state == STOPPED for state in states))


@application.command()
def show(
    place: Annotated[Path, typer.Argument(help="The flow's file, or its dir.")],
    follow: Annotated[bool, typer.Option("--follow", help="Draw again while the flow runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw the chain with its states, figures and reasons."""
    import json
    import time

    from ..flow.picture import chain_state, draw

    folder = place
    if place.is_file():
        from ..flow.settings import flow_folder, read_flow

        folder = flow_folder(read_flow(place), place)
    if as_json:
        print(json.dumps(chain_state(folder), indent=1))
    elif follow:
        from rich.live import Live

        with Live(refresh_per_second=2, vertical_overflow="visible") as live:
            while (state := chain_state(folder))["running"]:
                live.update(draw(state))
                time.sleep(0.5)
            live.update(draw(state))
    else:
        _draw(folder)


def _draw(folder: Path) -> None:
    from rich.console import Console

    from ..flow.picture import chain_state, draw

    Console(highlight=False).print(draw(chain_state(folder)))


def _print_plan(planned: list[PlannedStep]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "action", "work", "reason"):
        table.add_column(column, overflow="fold")
    for each in planned:
        table.add_row(each.name, each.action, each.work, each.reason)
    Console(highlight=False).print(table, markup=False)


flow_watch.register(application)
