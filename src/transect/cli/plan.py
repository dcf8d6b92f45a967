"""``transect plan``: plans of services and training runs on machines that need not be present."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import plan_calibrate, plan_drills, plan_serving, plan_workload

if TYPE_CHECKING:
    from ..costs.machine import Machine
    from ..plan.layouts import Candidate, Ranking

application = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
application.command("serving")(plan_serving.command)
application.command("calibrate")(plan_calibrate.command)
application.command("drills")(plan_drills.command)
application.command("workload")(plan_workload.command)

TOKENS = 2**15
"""Default number of tokens a step for each device."""
CHOSEN = ("parallel", "accumulate", "checkpointing", "data.micro_batch")
"""Settings of a run that the search sets for each layout."""


@application.callback()
def _group() -> None:
    """Plan a service or a training run without running it."""


@application.command("training")
def training(
    model: Annotated[str, typer.Argument(help="A built-in name or shape, a .gguf file, a directory, or a hub id.")],
    gpus: Annotated[int, typer.Option(min=1, help="Devices, all together.")] = 8,
    gpu: Annotated[str, typer.Option(help="A preset such as h100-80gb, l40s, mi300x; or a file.")] = "h100-80gb",
    memory: Annotated[str | None, typer.Option(help="Of each, such as 80GB; default: the preset's.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Bytes per second between devices of a host, one direction, such as 450GB.")
    ] = None,
    network: Annotated[str, typer.Option(help="The same between hosts, for each device.")] = "50GB",
    per_host: Annotated[int, typer.Option(min=1, help="Devices of one host.")] = 8,
    task: Annotated[str, typer.Option(help="pretrain, finetune, lora or qlora.")] = "finetune",
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or mixed.")] = "mixed",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit, lamb or muon.")] = "adamw",
    rank: Annotated[int, typer.Option(help="Of adapters.")] = 16,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a document; default: 4096, or as many as the model knows.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Of a step, all devices; default: 32768 for each.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Masters and the optimizer's state on the host.")] = False,
    axes: Annotated[str, typer.Option(help="Axes that may have several ranks.")] = "data,tensor,pipeline,context",
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 8,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of a run's file, where it is not chosen: lora.group=32."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> int:
    """Rank the layouts of a training run by predicted tokens per second, and explain the ranking."""
    from dataclasses import replace

    from ..checkpoints.resolve import described
    from ..costs.machine import Machine
    from ..costs.memory.training_plan import check_base
    from ..costs.presets import preset
    from ..costs.units import parse_bytes
    from ..plan.layouts import AXES
    from ..plan.layouts import rank as ranked
    from ..train.config import TrainConfig
    from ..train.loop.memory import check_length

    card = preset(gpu)
    machine = Machine.of(card)
    machine = replace(machine, per_host=per_host, network_bytes_per_second=float(parse_bytes(network)))
    if link is not None:
        machine = replace(machine, link_bytes_per_second=float(parse_bytes(link)))
    allowed = [axis.strip() for axis in axes.split(",") if axis.strip()]
    if unknown := sorted(set(allowed) - set(AXES)):
        raise ValueError(f"--axes knows {', '.join(AXES)}, not {', '.join(unknown)}")
    _check_changes(changes or [])
    source = described(model)
    seq_len = seq_len or min(4096, source.config.max_position)
    config = TrainConfig.from_dict({
        "model": source.name, "task": task, "precision": precision, "optimizer": {"name": optimizer},
        "lora": {"rank": rank}, "data": {"seq_len": seq_len, "micro_batch": seq_len},
    }).changed(changes or [])  # fmt: skip
    check_length(config, source.config)
    plan = _plan(config, source.config)
    check_base(source.config, plan)
    tokens = tokens or TOKENS * gpus
    budget = machine.memory_bytes if memory is None else parse_bytes(memory)
    result = ranked(source.config, plan, gpus, machine, tokens, budget=budget, axes=allowed, host_state=offload)
    if json:
        _dump(result)
    else:
        _show(result, source.name, card.name, tokens, top)
    if result.best is None:
        _nothing(result, source.config, plan, machine, tokens, allowed)
        return 1
    return 0


def _check_changes(changes: Sequence[str]) -> None:
    """Check that ``--set`` gives nothing that an option of the command sets, or that the ranking chooses. Raises
    ValueError."""
    for change in changes:
        name = change.partition("=")[0].strip()
        if name == "data.seq_len":
            raise ValueError("--set data.seq_len is --seq-len here: give that")
        if name in CHOSEN or name.startswith("parallel."):
            raise ValueError(
                f"--set {name}: this is chosen for each layout. Leave it out; --gpus, --axes, --tokens and --offload "
                "limit the choice"
            )


def _plan(config: Any, model: Any) -> Any:
    """Return the memory plan on a GPU."""
    import torch

    from ..train.loop.memory import plan_of

    return plan_of(config, model, torch.device("cuda"))


def _show(result: Ranking, name: str, gpu: str, tokens: int, top: int) -> None:
    from ..costs.units import gib

    print(f"training {name} on {result.gpus} x {gpu} (data sheet figures, not measured), {tokens} tokens a step")
    print("shares are of a step's time")
    rows: list[tuple[str, ...]] = [
        ("tokens/s", "ms a step", "compute", "again", "exposed", "bubble", "optimizer", "memory", "layout")
    ]
    for each in result.fitting[:top]:
        time = each.time
        shares = (time.compute + time.gradients, time.recompute, time.communication, time.bubble)
        shown = [f"{share / time.seconds:.0%}" if share else "-" for share in shares]
        shown += [f"{(time.optimizer + time.host) / time.seconds:.0%}", gib(each.estimate.needed)]
        rows.append((f"{time.tokens_per_second:,.0f}", f"{1e3 * time.seconds:,.0f}", *shown, str(each)))
    if result.fitting:
        widths = [max(len(row[column]) for row in rows) for column in range(8)]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            print("  ".join([*cells, row[8]]))
    best = result.best
    if best is not None:
        print(f"best: {best}: {best.time}")
        print(f"settings: {best.settings}")
        for line in result.reasons():
            print(f"  {line}")
    for other in result.others[:top]:
        print(f"does not fit: {other.spread}: needs {gib(other.estimate.needed)} of {gib(result.budget)}")
    reasons = {reason: spread for spread, reason in result.refused}
    for reason, spread in list(reasons.items())[:3]:
        print(f"impossible: {spread}: {reason}")


def _nothing(result: Ranking, config: Any, plan: Any, machine: Machine, tokens: int, axes: list[str]) -> None:
    import sys

    from ..costs.units import gib
    from ..plan.layouts import what_would

    if not result.others:
        alone = f"{', '.join(axes) or 'none'} within hosts of {machine.per_host} (--axes, --per-host)"
        why = (
            "change the settings that the reasons above name"
            if result.refused
            else f"{result.gpus} devices cannot be divided into {alone}"
        )
        print(f"no layout can be used: {why}", file=sys.stderr)
        return
    print(f"nothing fits in {gib(result.budget)} a device; what would:", file=sys.stderr)
    for line in what_would(config, plan, result, machine, tokens, axes) or ["a smaller model, or shorter documents"]:
        print(f"  {line}", file=sys.stderr)


def _dump(result: Ranking) -> None:
    from json import dumps

    def row(each: Candidate) -> dict[str, Any]:
        return {
            "layout": str(each.spread),
            "micro_batch": each.plan.micro_batch,
            "accumulate": each.plan.accumulate,
            "checkpointing": each.plan.checkpointing,
            "needed": each.estimate.needed,
            **each.time.to_dict(),
        }

    facts = {
        "budget": result.budget,
        "layouts": [row(each) for each in result.fitting],
        "why": result.reasons(),
        "do_not_fit": [row(each) for each in result.others],
        "refused": [{"layout": str(spread), "why": why} for spread, why in result.refused],
    }
    print(dumps(facts, indent=1))


@application.command("schedule")
def schedule(
    pp: Annotated[int, typer.Option(min=1, help="Stages: ranks that have some layers each.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step, for each group of stages.")] = 8,
    name: Annotated[str, typer.Option("--schedule", help="Its name, such as 1f1b; default: all.")] = "",
    chunks: Annotated[int, typer.Option(min=2, help="Runs of layers of each rank, for interleaved.")] = 2,
    backward: Annotated[float, typer.Option(min=0, help="Time of a backward pass, in forward passes.")] = 2.0,
    link: Annotated[
        float, typer.Option(min=0, help="Time to send activations to the next stage, in forward passes.")
    ] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print the actions and when they are done.")] = False,
) -> int:
    """Draw the schedule of a pipeline with its idle times.

    F0 is the forward pass of the first micro-batch, B0b its backward pass through the rank's second run of layers.
    """
    import json as encoder

    from ..spec.layouts.schedule import drawn, simulate
    from ..spec.layouts.schedule import schedule as made
    from ..spec.layouts.schedules.registry import schedule_kind, schedules

    found = {}
    for each in schedules() if not name else [name]:
        own = chunks if schedule_kind(each).chunked else 1
        try:  # a run of layers is as many times shorter as a rank has of them
            times = simulate(made(each, pp, microbatches, own), 1 / own, backward / own, link)
        except ValueError as error:
            if name:
                raise
            print(f"{each}: {error}", file=sys.stderr)
            continue
        found[each] = times
        if json:
            continue
        kept = f"at most {max(times.kept)} activations kept" + (f", of 1/{own} of a stage each" if own > 1 else "")
        print(f"{each}: {times.length:g} forward passes long, {max(times.bubbles):.1%} of it waiting, {kept}")
        for rank, line in enumerate(drawn(times)):
            print(f"  {rank}  {line.rstrip()}")
    if json:
        print(encoder.dumps({each: times.to_dict() for each, times in found.items()}))
    return 0
