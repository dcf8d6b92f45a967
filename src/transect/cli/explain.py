"""``transect explain``: what happens inside. Sub-commands look at one thing each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

application = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What happens inside, and what it costs.")


@application.callback()
def explain() -> None:
    """What happens inside, and what it costs."""


@application.command("backward")
def backward(
    subject: Annotated[str, typer.Argument(help="A model, or a Python file that leaves `loss` or defines `loss()`.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a model's batch: random ones, in two documents.", min=4)] = 64,
    task: Annotated[str, typer.Option(help="Task of a model: finetune, or lora (a frozen base).")] = "finetune",
    precision: Annotated[str, typer.Option(help="Precision of a model: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device of a model: auto, cpu or cuda.")] = "auto",
    load_format: Annotated[str, typer.Option(help="dummy: random weights in the shape of a model.")] = "auto",
    every: Annotated[bool, typer.Option("--every", help="Every node, also of layers that are alike.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What loss.backward() does: each node in order, what it saved, its bytes, its time.

    A Python file runs with __name__ set to "__explain__"; a function `loss()` of it is called twice and measured the
    second time. A model runs one packed batch through the training model, twice as well.
    """
    import dataclasses
    import json

    from ..explain.backward_text import lines
    from ..explain.losses import explain_model, explain_script
    from ..train.config import TrainConfig

    if subject.endswith(".py"):
        found = explain_script(Path(subject))
    else:
        settings = {"task": task, "precision": precision, "device": device, "load_format": load_format}
        found = explain_model(TrainConfig.from_dict({"model": subject, **settings}), tokens)
    if as_json:
        totals = {"activation_bytes": found.activation_bytes, "weight_bytes": found.weight_bytes, "peak": found.peak}
        print(json.dumps(dataclasses.asdict(found) | totals, indent=1))
        return
    for line in lines(found, every=every):
        print(line)
