"""``transect tune``: find the fastest configuration of an operator's launchers, or the kernels for a model's products
(``tune_model.py``), on this machine's GPU, and keep it."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .settings import output_file

if TYPE_CHECKING:
    from ..ops.tools.search import Found


def command(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP...|MODEL]",
            help="Operators, as `bench ops --list` names them, or a model; neither for the kernels of a serving step.",
        ),
    ] = None,
    shapes: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    launcher: Annotated[str, typer.Option(help="Only launchers whose name contains this.")] = "",
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Time limit per shape (60); of the whole search for a model (none) or a card (45)."),
    ] = None,
    rows: Annotated[str, typer.Option(help="For a model: numbers of rows, 1 to 256, comma-separated.")] = "",
    workers: Annotated[int, typer.Option(min=0, help="Processes that compile configurations first.")] = 0,
    load: Annotated[
        bool, typer.Option("--load", help="Time the fastest again under sustained load (not yet run on a GPU).")
    ] = False,
    keep: Annotated[bool, typer.Option(help="Keep the best in the user's tuning file.")] = True,
    ship: Annotated[bool, typer.Option("--ship", help="Write to the source tree instead.")] = False,
    json: Annotated[Path | None, output_file(help="Write every trial here.")] = None,
    report: Annotated[
        Path | None, output_file(help="Without names: describe the card, its rates and trials here.")
    ] = None,
) -> None:
    """Try operators' knobs (tile sizes, warps, stages, ...), or the kernels for a model's products, on this GPU; show
    what each is worth, keep the best."""
    from ..ops.registry import all_ops, get

    if not ops:
        from . import tune_card

        if shapes or launcher or rows or load or ship or json is not None:
            raise ValueError("--shapes, --launcher, --rows, --load, --ship and --json are for an operator or a model")
        return tune_card.tune(seconds, keep, report, show)
    if report is not None:
        raise ValueError("--report is of a card, without operators and models; those have --json")
    if len(ops) == 1 and ops[0] not in {op.name for op in all_ops()}:
        from ..checkpoints.resolve import resolve
        from . import tune_model

        try:
            try:
                source = resolve(ops[0], load_format="dummy")  # a preset or a folder: its sizes are enough
            except ValueError:
                source = resolve(ops[0], allow_download=False)
        except ValueError as error:
            raise ValueError(
                f"{ops[0]!r} is neither an operator (`transect bench ops --list`) nor a model: {error}"
            ) from None
        try:
            wanted = [int(each) for each in rows.split(",") if each]
        except ValueError:
            raise ValueError(f"--rows takes whole numbers with commas between them, not {rows!r}") from None
        return tune_model.tune(source.config, wanted, inf if seconds is None else seconds, load, keep, ship, json)
    if rows:
        raise ValueError("--rows is for a model; an operator has its shapes: --shapes")
    chosen = []
    for op in ops:
        entry = get(op)
        mine = [(entry, knobs) for knobs in entry.knobs() if launcher in knobs.name]
        if not mine:
            have = ", ".join(knobs.name for knobs in entry.knobs())
            where = f" in a launcher called {launcher!r}: {have}" if have else ""
            raise ValueError(f"{op} has no knobs to tune{where}")
        chosen += mine
    import torch

    from ..ops import tuning
    from ..ops.tools import search, search_worker, under_load

    if not torch.cuda.is_available():
        raise ValueError("tuning measures on the GPU, and torch finds none here; the rules of thumb stay in use")
    device = tuning.device_name()
    units = [
        (entry.name, knobs, case)
        for entry, knobs in chosen
        for case in search.cases_of(knobs, entry.cases(), "cuda", shapes)
    ]
    if not units:
        raise ValueError(f"no case of {', '.join(ops)} has {shapes!r} in its name; `transect bench ops --list`")
    if workers:
        search_worker.start([(op, knobs.name, case.name) for op, knobs, case in units], workers)

    def in_use(name: str, size: tuning.Size) -> tuning.Config | None:
        return tuning.choices(device).get(name, {}).get(tuning.bucket_name(size))

    found = []
    for _, knobs, case in units:
        found.append(
            search.search(knobs, case, seconds=seconds or 60.0, in_use=in_use, race=under_load.race if load else None)
        )
        show(found[-1])
        if keep:
            finding = {knobs.name: {found[-1].bucket: found[-1].choice}}
            path = tuning.save(device, finding, tuning.SHIPPED if ship else None)
        if json is not None:
            _write(json, device, found)
        torch.cuda.empty_cache()
    if keep:
        print(f"kept in {path}")


def show(found: Found) -> None:
    """Print a search: the gain, and the worth of each knob."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..ops.tools.results import microseconds_text

    console = Console()
    timed = [trial for trial in found.trials if trial.seconds is not None]
    rejected = len(found.trials) - len(timed)
    gain = "the heuristic's did not run" if found.gain is None else f"{found.gain:.3f}x the heuristic's speed"
    console.print(
        f"{found.launcher} [{found.bucket}], {found.case}: {len(timed)} timed, {rejected} rejected, {found.left} left; "
        f"best {microseconds_text(found.best.seconds or 0)} us, {gain}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("knob", "heuristic", "best", "worth"):
        table.add_column(column, justify="left" if column == "knob" else "right")
    for name, worth in found.worth().items():
        share = "?" if worth is None else f"{worth - 1:.1%}"
        table.add_row(name, str(found.default[name]), str(found.best.config[name]), share)
    console.print(table, highlight=False)
    for trial in found.trials:
        if trial.reason and "same in every run" in trial.reason:
            console.print(f"rejected as a race: {trial.config}", style="red", highlight=False, markup=False)


def _write(path: Path, device: str, found: list[Found]) -> None:
    from dataclasses import asdict
    from json import dumps

    from ..hardware.environment import environment

    searches = [{**asdict(f), "best": asdict(f.best), "gain": f.gain, "worth": f.worth()} for f in found]
    where = environment(("torch", "triton"))
    path.write_text(dumps({"device": device, "environment": where, "searches": searches}, indent=1) + "\n")
