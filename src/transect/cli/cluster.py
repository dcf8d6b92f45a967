"""``transect cluster``: a fleet of replicas, on Ray or as plain processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .settings import Command

application = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
)

File = Annotated[Path, typer.Argument(help="The fleet file (TOML).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@application.callback()
def group() -> None:
    """Run a fleet: replicas on many machines behind one address, with fail-over, roll and autoscaling."""


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"transect: {line}", flush=True)


@application.command(cls=Command)
def up(
    file: File,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file, print the settings, start nothing.")
    ] = False,
    json: Json = False,
) -> int:
    """Start a fleet on Ray, or apply changed bounds and policies to a running one."""
    from ..checkpoints.resolve import resolve
    from ..cluster.settings import read

    settings = read(file)
    if dry_run:
        resolve(settings.engine.model, load_format=settings.engine.load_format, revision=settings.engine.revision)
        for line in described(settings):
            print(line)
        return 0
    from ..cluster.ray_cluster import up as start

    _show(start(settings, say), json)
    return 0


def described(settings: Any) -> list[str]:
    """Return lines about what a fleet would start."""
    own, links, scaling = settings.replicas, settings.links, settings.scaling
    number = f"{own.min}" if own.most == own.min else f"{own.min} to {own.most}"
    rule = {
        "backlog": f"queued tokens within {scaling.target_s:g} s",
        "concurrency": f"{scaling.each:g} requests each",
        "fixed": "fixed",
    }[scaling.policy]
    memory = "" if own.memory_gb is None else f", {own.memory_gb:g} GB"
    return [
        f"fleet {settings.name}: {number} replicas of {settings.engine.model} ({rule})",
        f"engine: {settings.engine}",
        f"replica: {own.cpus:g} cores, {settings.gpus:g} GPUs{memory}; {own.drain_timeout_s:g} s to finish streams",
        f"server: {settings.server.host}:{settings.server.port}, {len(settings.server.api_keys)} keys",
        f"links: {links.host}:{links.port}, {'TLS' if links.ssl_certfile else 'no TLS'}, lost after "
        f"{links.lost_after_s:g} s",
        f"Ray: {settings.ray.address}; folder: {settings.place}",
    ]


@application.command(cls=Command)
def status(file: File, json: Json = False) -> int:
    """Show the replicas of a fleet, and the last decisions about their number."""
    from ..cluster.ray_cluster import state
    from ..cluster.settings import read

    _show(state(read(file)), json)
    return 0


@application.command(cls=Command)
def roll(file: File, json: Json = False) -> int:
    """Replace all replicas, each new one before an old one, after a change of the file or of the weights."""
    from ..cluster.ray_cluster import roll as replace
    from ..cluster.settings import read

    _show(replace(read(file), say), json)
    return 0


@application.command(cls=Command)
def scale(
    file: File,
    replicas: Annotated[
        int | None, typer.Argument(help="Number of replicas; without it the autoscaler decides.")
    ] = None,
    json: Json = False,
) -> int:
    """Set the number of replicas."""
    from ..cluster.ray_cluster import scale as change
    from ..cluster.settings import read

    _show(change(read(file), replicas, say), json)
    return 0


@application.command(cls=Command)
def down(file: File) -> int:
    """End a fleet after its streams, and the Ray cluster if `up` has started it."""
    from ..cluster.ray_cluster import down as end
    from ..cluster.settings import read

    end(read(file), say)
    return 0


@application.command(cls=Command)
def router(file: File) -> int:
    """Run the router of a fleet in this process, without Ray."""
    from ..cluster.router import run_router
    from ..cluster.settings import read

    return run_router(read(file))


@application.command(cls=Command)
def replica(
    file: File,
    name: Annotated[str | None, typer.Option(help="Name of the replica, unique in the fleet.")] = None,
    generation: Annotated[int, typer.Option(help="Number of the roll that starts it.", min=0)] = 0,
    ready_file: Annotated[
        Path | None, typer.Option(help="File that exists while the router has the replica, for probes.")
    ] = None,
) -> int:
    """Run one replica of a fleet in this process, without Ray. SIGTERM lets its streams finish."""
    from ..cluster.router import run_replica
    from ..cluster.settings import read

    return run_replica(read(file), name, generation, ready_file)


@application.command(cls=Command)
def manifests(
    file: File,
    form: Annotated[str, typer.Option(metavar="kubernetes|kuberay|systemd", help="Kind of manifests.")] = "kubernetes",
    image: Annotated[str, typer.Option(help="Container image with Transect, and with Ray for kuberay.")] = "transect",
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: print them.")] = None,
) -> int:
    """Write manifests of a fleet for Kubernetes or KubeRay, or units for systemd."""
    from ..cluster.manifests import manifests as made
    from ..cluster.settings import read

    for name, text in made(read(file), file.read_text(encoding="utf-8"), form, image).items():
        if out is None:
            print(f"# {name}\n{text}")
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text, encoding="utf-8")
            print(out / name)
    return 0


@application.command(cls=Command)
def schema() -> int:
    """Print the JSON schema of fleet files, for editors."""
    from json import dumps

    from ..cluster.settings import schema as made

    print(dumps(made(), indent=1))
    return 0


def _show(state: dict[str, Any], json: bool) -> None:
    from json import dumps

    if json:
        print(dumps(state))
        return
    print(f"{state.get('url') or 'no URL yet'}, generation {state.get('generation')}")
    for name, each in state.get("applications", {}).items():
        counts = ", ".join(f"{count} {what.lower()}" for what, count in each["replicas"].items() if count)
        print(f"{name}: {each['status'].lower()} ({counts})")
    for each in state["replicas"]:
        if each["state"] != "gone":
            print(
                f"  {each['name']}: {each['state']}, generation {each['generation']}, {each['streams']} requests, "
                f"{each['queued_tokens']} tokens queued, {each['tokens_per_s']:g} tokens/s, pace {each['pace']:g}"
            )
    for each in state["alarms"]:
        print(f"alarm: {each}")
    for each in state["decisions"][-1:]:
        print(f"autoscaler: {each['replicas']} replicas: {each['reason']}")
