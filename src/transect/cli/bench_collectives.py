"""``transect bench collectives``: collectives between ranks, over sizes, checked, with bandwidths as nccl-tests has
them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .settings import output_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..bench.collectives import CollectiveRow


def command(
    collective: Annotated[
        list[str] | None,
        typer.Argument(help="all_reduce, all_reduce_ours, all_gather, reduce_scatter, all_to_all, send_recv; all."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Ranks to start; default: every GPU here, or 2.")] = None,
    device: Annotated[str, typer.Option(help="auto (GPUs, where there are two), cpu (gloo) or cuda (NCCL).")] = "auto",
    min_bytes: Annotated[str, typer.Option(help="Smallest size, such as 8 or 1MiB.")] = "8",
    max_bytes: Annotated[str, typer.Option(help="Largest size, up to 1GiB.")] = "64MiB",
    factor: Annotated[int, typer.Option(min=2, help="Factor between sizes.")] = 8,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    iterations: Annotated[int, typer.Option(min=1, help="Iterations per size; fewer for large sizes.")] = 20,
    graphs: Annotated[bool, typer.Option(help="On GPUs: time inside a CUDA graph.")] = False,
    out: Annotated[Path | None, output_file(help="Write the results as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> int:
    """Measure how fast ranks exchange data.

    Starts the ranks on this machine, or uses the ranks that torchrun has started. Exits with 1 if a result is wrong.
    """
    import torch

    from ..bench.collectives import COLLECTIVES, JOB, OURS, Sweep, measure, sizes_between
    from ..costs.units import parse_bytes
    from ..parallel.gathering import under_torchrun
    from ..parallel.launch import Ranks

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, not {device!r}")
    gpus = torch.cuda.device_count()
    kind = device if device != "auto" else ("cuda" if gpus > 1 else "cpu")
    wanted = tuple(collective or (*COLLECTIVES, *([OURS] if kind == "cuda" else [])))
    if OURS in wanted and kind != "cuda":
        raise ValueError(f"{OURS} is between GPUs: leave it out, or give --device cuda")
    sizes = sizes_between(parse_bytes(min_bytes), parse_bytes(max_bytes), factor)
    plan = Sweep(wanted, sizes, dtype, iterations, graphs)
    joined = under_torchrun()
    group = Ranks.join(kind) if joined else Ranks.start(ranks or (gpus if kind == "cuda" else 2), kind)
    try:
        if not joined:
            group.call(JOB, plan)
        rows = measure(group.world, plan)
        if group.world.rank == 0:
            _show(rows, group.world.size, kind, plan.dtype, out, json)
    except BaseException as error:
        if (reason := group.explain(error)) is error:
            raise
        raise reason from error
    finally:
        group.close()
    return int(any(row.wrong for row in rows))


def _show(rows: Sequence[CollectiveRow], ranks: int, kind: str, dtype: str, out: Path | None, json: bool) -> None:
    from json import dumps

    from ..bench.environment import environment
    from .bench_shared import WIDTH

    library = "NCCL" if kind == "cuda" else "gloo"
    facts = {"ranks": ranks, "library": library, "dtype": dtype, "rows": [row.to_dict() for row in rows]}
    if out is not None:
        out.write_text(dumps({"environment": environment(), **facts}, indent=1) + "\n")
    if json:
        print(dumps(facts, indent=1))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{ranks} ranks, {library}, {dtype}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("collective")
    for name in ("bytes", "in place", "time", "floor", "algbw", "busbw", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rates = (f"{rate / 1e9:.3f} GB/s" for rate in (row.algbw, row.busbw))
        place = "yes" if row.in_place else "no"
        times = f"{row.seconds * 1e6:.1f} us", "" if row.floor is None else f"{row.floor * 1e6:.1f} us"
        table.add_row(row.collective, f"{row.bytes:,}", place, *times, *rates, str(row.wrong))
    Console(width=max(Console().width, WIDTH)).print(table, highlight=False)
