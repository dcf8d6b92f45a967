"""``transect bench``: how fast models run, offline and as a server. Sub-commands look at one side each."""

from __future__ import annotations

import typer

from . import bench_collectives, bench_latency, bench_ops, bench_serve, bench_throughput

application = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure an engine, a server or operators against the floor.",
)
application.command("latency")(bench_latency.command)
application.command("throughput")(bench_throughput.command)
application.command("serve")(bench_serve.command)
application.command("ops")(bench_ops.command)
application.command("collectives")(bench_collectives.command)
