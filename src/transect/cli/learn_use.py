"""The runs of ``transect learn use``: the commands that a student's piece is put into."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..learn.live import Placed, own_module, piece

ROUTED = 400
"""Requests of a trace that a router gets."""


def run(here: Placed, *, model: str, max_tokens: int, steps: int, trace: Path | None) -> None:
    """Run the command of the rung's record.

    Raises:
        ValueError: the command failed, or needs a GPU that is not there.
    """
    live = here.rung.live
    assert live is not None
    if trace is not None and here.rung.name == "router":
        _route(here, trace)
    elif live.runs == "serve":
        _serve(here, model, max_tokens)
    elif live.runs == "train":
        _train(here, steps)
    elif live.runs == "fleet":
        _fleet(here, trace)
    else:
        _benchmark(here)


def _serve(here: Placed, model: str, max_tokens: int) -> None:
    from . import demo

    live = here.rung.live
    assert live is not None
    by_option = [name for name in live.pieces if ":" not in name]
    options = [word for name in by_option for word in (name, f"{here.folder}/piece.py:Piece")]
    options += live.options
    demo.run(model, max_tokens, None, options, environment=here.environment, sampling=live.settings)


def _train(here: Placed, steps: int) -> None:
    """Train a model of 60,000 weights on the pages of the ladder; an adapter is trained on one that was trained before,
    without the piece."""
    from ..learn.live_training import write_run

    live = here.rung.live
    assert live is not None
    settings = dict(live.settings)
    if settings.get("task") == "lora":
        _command(["train", str(write_run(here.folder / "base", 2, {}))], None, "the run before", quiet=True)
        settings["model"] = str(here.folder / "base" / "run" / "last")
    file = write_run(here.folder / "own", steps, settings)
    print(f"training a small model for {steps} steps with your {here.rung.name}", flush=True)
    _command(["train", str(file)], here.environment, "the training run")


def _benchmark(here: Placed) -> None:
    live = here.rung.live
    assert live is not None
    if not os.path.exists("/dev/nvidiactl"):
        raise ValueError(
            f"{here.rung.name} replaces a Triton kernel of the package, which runs on a GPU only, and this machine has "
            f"none: `transect learn check {here.rung.name}` runs yours in the interpreter"
        )
    command = ["bench", "ops", *live.options, "--device", "cuda", "--check"]
    _command(command, here.environment, "the benchmark")


def _fleet(here: Placed, trace: Path | None) -> None:
    """Play a load under the student's autoscaler, and beside it under fixed numbers of replicas."""
    from ..bench.traces.asked import rate_of
    from ..bench.traces.reading import read_trace
    from ..learn.rungs.fleet import planned

    asked = planned.requests(planned.morning(0)) if trace is None else read_trace(trace, limit=2000)
    model, capacity = planned.engine(planned.PLACES), planned.CAPACITY
    if trace is not None:
        model, capacity = planned.engine(), planned.capacity_for(asked)
    print(f"{len(asked)} requests, {rate_of(asked):.2f} a second, on replicas that serve {capacity:.2f} a second each")
    print("| autoscaler | late | replica-hours | most replicas |\n|---|---|---|---|")
    decide = piece(here.folder)
    rows = [("yours", decide), *((f"always {n}", lambda *_, n=n: n) for n in (4, 8, 12))]
    for name, each in rows:
        _, late, hours, most = planned.scale(each, asked, model, capacity)
        print(f"| {name} | {late:.1%} | {hours:.2f} | {most} |", flush=True)


def _route(here: Placed, trace: Path) -> None:
    """Play a recorded load through the student's router, and beside it through the shipped one, in the planner's
    fleet."""
    from ..bench.traces.reading import read_trace
    from ..engine.scheduling.policies.routing import Router
    from ..learn.rungs.fleet import planned

    rows = planned.rows(read_trace(trace, limit=ROUTED))
    print(f"{len(rows)} requests over {planned.ENGINES} engines, in the planner's simulator")
    print("| router | mean seconds to the first token | requests of each engine |\n|---|---|---|")
    for name, router in (("yours", own_module(here.folder).Router), ("shipped", Router)):
        chosen, seconds = planned.route(router, rows)
        counts = ", ".join(str(chosen.count(engine)) for engine in range(planned.ENGINES))
        print(f"| {name} | {seconds:.3f} | {counts} |", flush=True)


def _command(words: Sequence[str], environment: Mapping[str, str] | None, what: str, *, quiet: bool = False) -> None:
    """Run a command of this package.

    Raises:
        ValueError: it failed; its own message is above.
    """
    output: Any = subprocess.DEVNULL if quiet else None
    done = subprocess.run([sys.executable, "-m", "transect", *words], env=environment, stdout=output)
    if done.returncode:
        raise ValueError(f"{what} ended with exit code {done.returncode}; its own message is above")
