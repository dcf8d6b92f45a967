"""Pictures of a followed kernel: tiles with the program that wrote them, what one program read, watched variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .trace import OUTSIDE, Access, Argument, Launch, Program

COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green", "bright_yellow", "white")


def flat_program(launch: Launch, program: Program) -> int:
    """Return a program's number with the first axis of the grid fastest, as a GPU starts them."""
    (x, y, z), (nx, ny, _) = program, launch.grid
    return x + nx * (y + ny * z)


def numbers(launch: Launch, argument: str, accesses: Sequence[Access]) -> np.ndarray:
    """Return the text to show for each element of an argument, as an array of strings; '' where no program accessed it.

    The number of the program; ``p.k`` for its k-th access of the argument where some program has several.
    """
    found = np.full(int(np.prod(launch.arguments[argument].shape, dtype=np.int64)), "", dtype=object)
    counts: dict[Program, int] = {}
    chosen = [access for access in accesses if access.argument == argument and access.elements.size]
    several = len({access.program for access in chosen}) < len(chosen)
    for access in chosen:
        k = counts.get(access.program, 0)
        counts[access.program] = k + 1
        program = str(flat_program(launch, access.program))
        found[access.elements] = f"{program}.{k}" if several else program
    return found


def as_matrix(argument: Argument, values: np.ndarray) -> tuple[np.ndarray, str]:
    """Return an argument's elements as rows and columns, and a note where dimensions were joined for it."""
    shape = argument.shape
    if len(shape) == 2:
        return values.reshape(shape), ""
    if len(shape) < 2:
        return values.reshape(1, -1), ""
    return values.reshape(-1, shape[-1]), f"all dimensions but the last of {list(shape)} joined to rows"


def cut(lines: Sequence[Any]) -> list[tuple[int, int]]:
    """Find runs of equal adjacent lines: ``[(first, past the last), ...]``."""
    edges = [0, *(i for i in range(1, len(lines)) if not np.array_equal(lines[i], lines[i - 1])), len(lines)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def tiles(matrix: np.ndarray) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Find (row runs, column runs) of constant values."""
    return cut(list(matrix)), cut(list(matrix.T))


def _range(run: tuple[int, int]) -> str:
    return str(run[0]) if run[1] == run[0] + 1 else f"{run[0]}-{run[1] - 1}"


def grid(argument: Argument, values: np.ndarray, title: str, most: int = 24) -> Any:
    """Return a title, and a table: one cell for each tile, with row and column ranges at its sides."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    matrix, note = as_matrix(argument, values)
    rows, columns = tiles(matrix)
    table = Table(box=box.SQUARE, show_lines=True, pad_edge=False)
    table.add_column("")
    for run in columns[:most]:
        table.add_column(_range(run), justify="center")
    for run in rows[:most]:
        cells = []
        for column in columns[:most]:
            text = matrix[run[0], column[0]]
            color = COLORS[int(text.split(".")[0]) % len(COLORS)] if text else "dim"
            cells.append(Text(text or "·", style=color))
        table.add_row(_range(run), *cells)
    if len(rows) > most or len(columns) > most:
        note = f"{note}; " * bool(note) + f"the first {most} of {len(rows)} x {len(columns)} tiles"
    return Group(Text(title + (f" ({note})" if note else "")), table)


def written(launch: Launch) -> Iterator[Any]:
    """Draw, for each argument that was written, which program wrote what, in the order of the numbers."""
    stores = [access for access in launch.accesses if access.kind != "load"]
    for name in launch.stored():
        argument = launch.arguments[name]
        yield grid(argument, numbers(launch, name, stores), f"{name} {list(argument.shape)}: written by program")


def loaded(launch: Launch, program: Program) -> Iterator[tuple[Argument, np.ndarray]]:
    """Yield each argument that one program read, and for each of its elements the number of the load that read it."""
    own = [access for access in launch.of(program) if access.kind == "load" and access.argument != OUTSIDE]
    for name in dict.fromkeys(access.argument for access in own):
        argument = launch.arguments[name]
        found = np.full(int(np.prod(argument.shape, dtype=np.int64)), "", dtype=object)
        for k, access in enumerate([access for access in own if access.argument == name]):
            found[access.elements] = str(k)
        yield argument, found


def read_by(launch: Launch, program: Program) -> Iterator[Any]:
    """Draw, for each argument that one program read, which of its loads read which elements."""
    for argument, found in loaded(launch, program):
        what = f"{argument.name} {list(argument.shape)}"
        yield grid(argument, found, f"{what}: read by program {flat_program(launch, program)}, by number of its load")


def accesses(launch: Launch, program: Program) -> Any:
    """Show every access of one program as a table: what, of which argument, which elements, how many masked off."""
    from rich import box
    from rich.table import Table

    title = f"program {flat_program(launch, program)}, in order"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "argument", "elements", "masked off"):
        table.add_column(column)
    for access in launch.of(program):
        where = "" if access.argument == OUTSIDE else _where(launch.arguments[access.argument], access.elements)
        table.add_row(access.kind, access.argument, where or "none", str(access.masked or ""))
    return table


def _where(argument: Argument, elements: np.ndarray) -> str:
    """Describe the box that holds the elements, ``[4:8, 0:4]``, and their number where they do not fill it."""
    if not elements.size:
        return ""
    if not argument.shape:
        return "the only one"
    index = np.unravel_index(elements, argument.shape)
    bounds = [(int(axis.min()), int(axis.max()) + 1) for axis in index]
    volume = int(np.prod([b - a for a, b in bounds]))
    text = "[" + ", ".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in bounds) + "]"
    distinct = len(np.unique(elements))
    return text if distinct == volume else f"{distinct} in {text}"


def steps(launch: Launch, program: Program, row: int = 0) -> Any | None:
    """Return the watched variables of one program, step by step, at one row of its tile; None where nothing was
    watched."""
    from rich import box
    from rich.table import Table

    own = [step for step in launch.steps if step.program == program]
    if not own:
        return None
    title = f"program {flat_program(launch, program)}, row {row} of its tile, step by step"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    for name in own[0].values:
        table.add_column(name, justify="right")
    for number, step in enumerate(own):
        table.add_row(str(number), *(_number(value, row) for value in step.values.values()))
    return table


def _number(value: Any, row: int) -> str:
    if isinstance(value, np.ndarray):
        chosen = value[min(row, len(value) - 1)]
        return np.array2string(np.asarray(chosen), precision=4, floatmode="maxprec")
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def busiest(launch: Launch) -> int:
    """Return the first of the programs that access memory most often."""
    return min((-len(launch.of(program)), flat_program(launch, program)) for program in launch.programs)[1]


def outside(launch: Launch) -> list[Access]:
    """List the accesses of memory that belongs to no argument: a bug of the kernel, or scratch memory of its launcher.
    One that is masked off as a whole accesses none."""
    return [access for access in launch.accesses if access.argument == OUTSIDE and access.elements.size]


def plot(launches: Sequence[Launch], program: int | None, path: Path) -> None:
    """Draw the same grids as colored pictures: the writes, and below them one program's reads."""
    from .plots import pyplot

    plt = pyplot()
    panels: list[tuple[str, Argument, np.ndarray]] = []
    for launch in launches:
        stores = [access for access in launch.accesses if access.kind != "load"]
        for name in launch.stored():
            panels.append(
                (f"{launch.kernel}: {name}, written by", launch.arguments[name], numbers(launch, name, stores))
            )
        wanted = busiest(launch) if program is None else program
        for who in [p for p in launch.programs if flat_program(launch, p) == wanted]:
            for argument, found in loaded(launch, who):
                title = f"{launch.kernel}: {argument.name}, read by {wanted} (number of its load)"
                panels.append((title, argument, found))
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (title, argument, values) in zip(axes.flat, panels, strict=False):
        matrix, _ = as_matrix(argument, values)
        shades = np.vectorize(lambda text: int(text.split(".")[0]) if text else -1)(matrix)
        axis.set_axis_on()
        axis.imshow(np.ma.masked_equal(shades, -1), cmap="viridis", aspect="auto")
        axis.set_title(title, fontsize=8)
        rows, sides = tiles(matrix)
        for a, b in rows:
            for c, d in sides:
                axis.text(
                    (c + d - 1) / 2, (a + b - 1) / 2, matrix[a, c], ha="center", va="center", color="white", fontsize=7
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
