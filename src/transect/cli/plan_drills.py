"""``transect plan drills``: failures of a fleet, predicted before they happen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .plan_serving import LENGTHS, OutputTokens, PromptTokens


def command(
    file: Annotated[Path, typer.Argument(help="The fleet file (TOML).")],
    profile: Annotated[Path, typer.Option(help="A replica as `transect plan calibrate` measured it.")],
    rate: Annotated[float, typer.Option(help="Requests per second of the whole fleet.")],
    replicas: Annotated[int | None, typer.Option(min=2, help="Number of replicas; default: the file's min.")] = None,
    start: Annotated[float, typer.Option(min=0, help="Seconds that an engine takes to start.")] = 10.0,
    replica_start: Annotated[
        float | None, typer.Option(help="Seconds of a whole replica's start by the cluster; default: --start plus 5.")
    ] = None,
    router_start: Annotated[float, typer.Option(min=0, help="Seconds until a dead router is replaced.")] = 6.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the load; failures come after a third.")] = 60.0,
    prompt_tokens: PromptTokens = LENGTHS[0],
    output_tokens: OutputTokens = LENGTHS[1],
    seed: Annotated[int, typer.Option(help="Seed of lengths and arrivals.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds.")] = False,
) -> int:
    """Predict the capacity that failures of a fleet cost, and the latency that they add.

    Limits such as hung-after and lost_after_s are those of the file."""
    from dataclasses import asdict
    from json import dumps

    from ..bench.lengths import Lengths
    from ..bench.traces.mix import Mix
    from ..cluster.settings import read
    from ..plan.drills import DRILLS, FleetTimes, predict
    from ..plan.profile import Profile

    settings, engine = read(file), Profile.read(profile).engine
    count = replicas or settings.replicas.min
    if count < 2:
        raise ValueError(f"{file} has one replica, and none is left when it fails: give --replicas 2 or more")
    if rate <= 0:
        raise ValueError(f"--rate must be above 0, got {rate:g}")
    times = FleetTimes(
        engine=start, replica=start + 5.0 if replica_start is None else replica_start, router=router_start,
        hung_after=settings.engine.silence_s, lost_after=settings.links.lost_after_s,
        drain=settings.replicas.drain_timeout_s,
    )  # fmt: skip
    longest = engine.scheduler.max_model_len
    mix = Mix(prompt=Lengths.parse(prompt_tokens), output=Lengths.parse(output_tokens), longest=longest)
    asked = mix.generate(rate, max(10, int(rate * seconds)), seed)
    found = predict(engine, count, asked, times, at=seconds / 3)
    if json:
        print(dumps({name: asdict(each) for name, each in found.items()}, indent=1))
        return 0
    print(f"{count} replicas, {rate:g} requests/s: predicted from {profile}, not measured")
    print(f"{'p99':>8}  {'added':>8}  {'lost':>12}  {'dropped':>7}  drill")
    for name, each in found.items():
        lost = f"{each.lost:.1f} replica-s"
        print(f"{each.p99:>6.2f} s  {each.added_p99:>+6.2f} s  {lost:>12}  {each.dropped:>7}  {DRILLS[name][0]}")
    return 0
