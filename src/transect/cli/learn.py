"""``transect learn``: the graded ladder, from a dot product to a fleet."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .engine_options import BUILTIN
from .settings import output_file

application = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="Rung, as in `transect learn list`, or a file of `transect learn new`.")]
Folder = Annotated[Path, typer.Option("--dir", help="The folder of your program.")]


@application.callback()
def learn() -> None:
    """Build the whole stack yourself, one graded exercise at a time."""


@application.command("list")
def list_rungs(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show the ladder and your progress."""
    from ..learn.ladder import rows

    found = rows()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    marks = {"done": "x", "open": " ", "later": "."}
    road = ""
    for row in found:
        if row["road"] != road:
            road = row["road"]
            print(f"{road}:")
        print(f"  [{marks[row['state']]}] {row['name']:<18} {row['title']}")
    done = sum(row["state"] == "done" for row in found)
    print(f"{done} of {len(found)} done; [ ] is open to you, [.] comes after rungs that are not done")
    following = next((row["name"] for row in found if row["state"] == "open"), None)
    if following is not None:
        print(f"next: transect learn start {following} --dir {following}")


@application.command()
def start(
    rung: Name,
    folder: Folder,
    solution: Annotated[
        bool, typer.Option("--solution", help="Write the shipped solution instead of the gap.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing program.")] = False,
) -> None:
    """Write a folder with a page, a program with a gap, a test and hints."""
    from ..learn.folder import write
    from ..learn.registry import get

    found = get(rung)
    files = write(found, folder, solution=solution, force=force)
    print(f"{found.title}: read {folder / 'README.md'}, then write {files[0]}")
    print(f"grade it: transect learn check {found.called} --dir {folder}")


@application.command()
def check(
    rung: Name,
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    compile_kernels: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile kernels ahead of time for an H100.")
    ] = True,
) -> None:
    """Grade your program: correctness, then speed. Exit 1 if it is wrong."""
    from dataclasses import asdict

    from ..hardware.device import detect
    from ..hardware.measured import ceilings
    from ..learn.folder import program
    from ..learn.grade.grader import check as graded
    from ..learn.ladder import advice
    from ..learn.progress import note
    from ..learn.registry import get

    found = get(rung)
    path = program(found, folder)
    device = "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"
    verdict = graded(found, path, device, lambda: ceilings(detect(device)), compile_kernels=compile_kernels)
    if verdict.right:
        note(verdict, folder)
    if as_json:
        print(json.dumps({**asdict(verdict), "percent": verdict.percent}, indent=1))
    else:
        print("\n".join([*verdict.lines(), *advice(found, folder, verdict.right)]))
    if not verdict.right:
        raise typer.Exit(1)


@application.command()
def show(
    rung: Name,
    folder: Annotated[Path | None, typer.Option("--dir", help="Compare with the program in this folder.")] = None,
) -> None:
    """Show the shipped solution, or how yours differs from it, and why the shipped code goes further."""
    import difflib

    from ..learn.folder import program
    from ..learn.registry import get

    found = get(rung)
    if folder is None:
        print(found.solution, end="")
    else:
        yours = program(found, folder).read_text().splitlines()
        lines = difflib.unified_diff(yours, found.solution.splitlines(), "yours", "shipped", lineterm="", n=2)
        print("\n".join(lines) or "yours is the shipped solution")
    if found.differences:
        print(f"\n{found.differences}")
    if found.shipped:
        print(f"The shipped code: src/transect/{found.shipped}")


@application.command()
def use(
    rung: Name,
    folder: Folder = Path("."),
    model: Annotated[str, typer.Option(help="Model that your piece serves.")] = BUILTIN,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of one answer at the most.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a training run.")] = 12,
    trace: Annotated[
        Path | None, typer.Option(help="A trace for your router or autoscaler: any that bench serve --trace reads.")
    ] = None,
) -> None:
    """Run the server, a training run, the planner's fleet or a GPU benchmark with your piece inside."""
    from ..learn.folder import program
    from ..learn.live import placed
    from ..learn.registry import get
    from . import learn_use

    found = get(rung)
    with placed(found, program(found, folder)) as here:
        try:
            learn_use.run(here, model=model, max_tokens=max_tokens, steps=steps, trace=trace)
        except Exception as error:
            if failure := here.failure():
                raise ValueError(failure) from error
            raise
        print(here.report())


@application.command()
def report(
    output: Annotated[Path, output_file("--output", "-o", help="The HTML file.")] = Path("portfolio.html"),
) -> None:
    """Write a page of your solutions, with times, floors, machine and date."""
    from ..learn.portfolio import page
    from ..learn.progress import climbed

    done = climbed()
    if not done:
        raise ValueError("nothing is solved yet: `transect learn list` shows where to begin")
    output.write_text(page(done), encoding="utf-8")
    print(f"{output}: {len(done)} rungs")


@application.command()
def new(
    output: Annotated[Path, output_file("--output", "-o", help="The file of the rung.")],
    name: Annotated[
        str | None, typer.Argument(help="Operator, as `transect bench ops --list` names it, policy or objective.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="operator:NAME, policy:NAME or objective:NAME, as in policy:order.")
    ] = None,
) -> None:
    """Make the file of a new rung from an operator, a policy or an objective: page, hole, cases and bounds, for you to
    edit."""
    from ..learn.template import rung_of

    if (name is None) == (source is None):
        raise ValueError("name what the rung is made from: `transect learn new gelu`, or --from policy:order")
    output.write_text(rung_of(name or source or ""), encoding="utf-8")
    print(f"{output}: edit it, then try it: transect learn start {output} --dir FOLDER --solution")


@application.command("class")
def grade_class(
    rung: Name,
    submissions: Annotated[Path, typer.Argument(help="A folder with one folder for each student.")],
    output: Annotated[Path | None, output_file("--output", "-o", help="Also write the table to this file.")] = None,
) -> None:
    """Grade a folder of submissions in a sandbox without network, and write a table."""
    from ..learn.classroom import grade_class as graded
    from ..learn.classroom import table
    from ..learn.registry import get

    found = get(rung)
    text: Any = table(found, list(graded(found, submissions)))
    print(text, end="")
    if output is not None:
        output.write_text(text, encoding="utf-8")
