"""The training half of ``transect memory``: from options or a run's file to the account of a rank."""

from __future__ import annotations

import json as encoder
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec.settings import Setting, settings_of
from ..train.config import TrainConfig

if TYPE_CHECKING:
    from ..checkpoints.resolve import ModelSource
    from ..costs.memory.training_ranks import StageMemory

OPTIONS = {
    "task": "task",
    "objective": "objective",
    "precision": "precision",
    "optimizer": "optimizer.name",
    "checkpointing": "checkpointing",
    "micro_batch": "data.micro_batch",
    "seq_len": "data.seq_len",
    "accumulate": "accumulate",
    "rank": "lora.rank",
    "zero": "parallel.zero",
    "reduce": "parallel.reduce",
    "sp": "parallel.sequence",
    "cp": "parallel.context",
}
"""Options made from the settings of a run, by their names in its TOML file."""
SETTINGS = OPTIONS | {
    "dp": "parallel.data",
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "ep": "parallel.expert",
}
"""All options that are settings of a run; those of ``SHARED`` are an engine's too."""
LAYOUT = ("dp", "zero", "fsdp", "tp", "sp", "pp", "cp", "ep")
"""Options that set the number of ranks."""


def run_settings() -> tuple[Setting, ...]:
    """Return ``OPTIONS`` as settings, whose types and meanings are those of the fields of ``TrainConfig``."""
    tables = typing.get_type_hints(TrainConfig, include_extras=True)
    found = []
    for option, path in OPTIONS.items():
        table, _, name = path.rpartition(".")
        setting = next(each for each in settings_of(tables[table] if table else TrainConfig) if each.name == name)
        also = ("context_parallel_size",) if option == "cp" else ()
        about = replace(setting.about, option=option.replace("_", "-"), also=also)
        found.append(replace(setting, name=option, about=about, group="Training run (--train)"))
    return tuple(found)


def run_of(model: str, options: Mapping[str, Any], given: Collection[str], changes: Sequence[str]) -> TrainConfig:
    """Build the configuration of the run from a model or file, options and changes.

    Args:
        model: a model, or the TOML file of a run.
        options: of the command, by parameter.
        given: those that were given; of a file's run, only these take the place of what the file says.
        changes: ``key=value`` settings, which go over all.

    Raises:
        ValueError: the file is not a run's, or what it asks for cannot be.
    """
    from ..train.loop.crew import check

    of_file = is_run(model)
    wanted = {name: options[name] for name in SETTINGS if options[name] is not None and (name in given or not of_file)}
    fsdp = options["fsdp"]
    if fsdp is not None:
        if options["dp"] > 1 or options["zero"] not in (None, 3):
            raise ValueError("--fsdp N is --dp N --zero 3: give one or the other")
        wanted |= {"dp": fsdp, "zero": 3 if fsdp > 1 else 0}
    settings = [f"{SETTINGS[name]}={encoder.dumps(value)}" for name, value in wanted.items()]
    if options["offload"] or options["offload_all"]:
        settings.append(f'parallel.offload="{"all" if options["offload_all"] else "optimizer"}"')
    if options["offload_all"] and wanted.get("dp", 1) > 1 and wanted.get("zero") is None:
        settings.append("parallel.zero=3")
    if not of_file and options["accumulate"] is None:
        settings.append(f"accumulate={wanted['dp'] * wanted['pp']}")
    if of_file:
        config = TrainConfig.from_toml(model, [*settings, *changes])
    else:
        config = TrainConfig.from_dict({"model": model}).changed([*settings, *changes])
    check(config)
    return config


def is_run(model: str) -> bool:
    """Return True if ``model`` names a run's TOML file and not a model."""
    return model.endswith(".toml") and not Path(model).is_dir()


def show_training(config: TrainConfig, source: ModelSource, kind: str, budget: int, json: bool) -> bool:
    """Print the account of the rank that needs most, and the verdict; return True if it fits.

    Args:
        kind: ``cpu`` or ``cuda``.
        budget: bytes that are free there; on a CPU all ranks together have them.

    Raises:
        ValueError: the run cannot be, or not be spread so.
    """
    import torch

    from ..costs.memory.fit import first_that_fits, smallest_change
    from ..costs.memory.training_ranks import estimator, for_rank, training_ranks
    from ..costs.units import gib, parse_bytes
    from ..train.loop.memory import check_length, plan_of, spread_of
    from .memory_tables import dump, show

    check_length(config, source.config)
    share, ranks = "", config.parallel.layout.size
    if kind == "cpu" and ranks > 1:
        share = f", the share of one of {ranks} processes in {gib(budget)}"
        budget //= ranks
    if config.memory and (limit := parse_bytes(config.memory)) < budget:
        budget, share = limit, ""
    device = torch.device(kind)
    plan, spread = plan_of(config, source.config, device), spread_of(config, device)
    account = estimator(spread)
    account(source.config, plan)  # an impossible layout is reported here
    if config.checkpointing == "auto":
        found = first_that_fits(source.config, plan, budget, account)
        plan = found[0] if found else replace(plan, checkpointing="full")
    plan = for_rank(plan, spread)
    stages = training_ranks(source.config, plan, spread)
    worst = max(stages, key=lambda stage: stage.estimate.needed)
    estimate = worst.estimate
    fits = estimate.fits(budget)
    change = None if fits else smallest_change(source.config, plan, budget, account)
    if json:
        facts: dict[str, Any] = {
            "task": config.task,
            "objective": config.objective,
            "precision": config.precision,
            "optimizer": config.optimizer.name,
            "checkpointing": plan.checkpointing,
            "layers_without": plan.whole,
            "budget": budget,
            "fits": fits,
        }
        facts["ranks"] = [
            {"stage": number, "share": str(stage.shard), **stage.estimate.to_dict()}
            for number, stage in enumerate(stages)
        ]
        facts["layout"] = str(spread)
        dump(estimate, {**facts, "change": dict(change.settings) if change else None})
        return fits
    place = f", {spread}, on each of {spread.ranks} ranks" if spread.ranks > 1 else ""
    if len(stages) > 1:
        place = f", {spread}: what the worst stage needs, number {stages.index(worst)}"
    goal = "" if config.objective == "next_token" else f" with {config.objective}"
    sizes = f"micro-batches of {plan.micro_batch} tokens, {plan.accumulate} to a step"
    print(f"{config.task}{goal}, {config.precision}, {config.optimizer.name}, {sizes}")
    show(f"training {source.name}, checkpointing {plan.checkpointing}{place}", estimate)
    if len(stages) > 1:
        _stages(stages)
    if fits:
        print(f"fits: {gib(estimate.needed)} of {gib(budget)}{share}")
    else:
        print(f"does not fit: {gib(estimate.needed)}, and {gib(budget)} are there{share}")
        print(f"smallest change that does: {change}" if change else "only a smaller model or task would fit")
    return fits


def _stages(stages: list[StageMemory]) -> None:
    """Show the terms of every stage as columns of one table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..costs.units import gib

    table = Table(title="each rank of stage", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("term")
    found = [{term.name: term.bytes for term in stage.estimate.terms} for stage in stages]
    for number in range(len(stages)):
        table.add_column(str(number), justify="right", no_wrap=True)
    for name in dict.fromkeys(name for each in found for name in each if each[name]):
        table.add_row(name, *(gib(each.get(name, 0)) if each.get(name) else "-" for each in found))
    table.add_row("peak", *(gib(stage.estimate.peak) for stage in stages))
    Console().print(table, highlight=False)
