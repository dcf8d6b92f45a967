"""Parts that the ``bench`` commands share: an engine and the inputs of its floor, energy, tables and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.layouts.ranks import RankLayout
from .settings import output_file

if TYPE_CHECKING:
    from ..bench.energy import EnergyMeter
    from ..costs.floors import Rates
    from ..costs.storage import Storage
    from ..engine.config import EngineConfig
    from ..engine.frontends.llm import LLM
    from ..spec.model import ModelConfig

ALONE = RankLayout()
"""One rank."""

WIDTH = 132
"""Width of tables in a file or a narrow terminal, so that no number is split."""

Model = Annotated[str, typer.Option(help="A built-in name, a .gguf file, a directory or a hub id.")]
Runs = Annotated[int, typer.Option(min=1, help="Measured runs after a warm-up; the median is shown.")]
MeasureEnergy = Annotated[bool, typer.Option("--energy", help="Measure joules per token (NVML).")]
EnergyGpu = Annotated[int, typer.Option(min=0, help="Index of that GPU in nvidia-smi.")]
Json = Annotated[Path | None, output_file("--json", help="Write all figures to this file.")]


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine, with the inputs of its floor."""

    llm: LLM
    config: ModelConfig
    rates: Rates
    storage: Storage
    measured: str = ""
    """Origin of the rates, in words."""
    layout: RankLayout = ALONE
    """The ranks that have a device each; on a CPU they share its cores, and are as one."""

    def explain(self, parts: Iterable[Mapping[str, float]]) -> None:
        """Explain a share of the device's ceiling above 1."""
        highest = max((part[name] for part in parts for name in ("of_floor", "mbu", "mfu")), default=0.0)
        if highest > 1:
            print(
                f"transect: {highest:.0%} of the device's ceiling means that the ceiling, {self.measured}, is too low: "
                "measure it again with `transect hardware --again` while nothing else runs"
            )


def subject(settings: EngineConfig, shorter: str) -> Subject:
    """Load the model, after measuring the device's ceilings unless they are known.

    Args:
        settings: with the ``max_model_len`` that the work needs.
        shorter: the options that make it shorter.

    Raises:
        ValueError: the work is longer than the model's context, or the model does not load.
    """
    import dataclasses

    import torch

    from ..checkpoints.kernel_choice import in_blocks, kernels, kv_dtype
    from ..checkpoints.layouts import storage_of
    from ..checkpoints.resolve import resolve
    from ..costs.floors import Rates
    from ..engine.device import device_for
    from ..engine.frontends.llm import LLM
    from ..engine.offload import planned_stream
    from ..hardware.device import detect
    from ..models.weights.kinds import rounded_values
    from ..ops.cpu.ceilings import device_measurement
    from ..spec.layouts.shards import first_shard

    source = resolve(settings.model, load_format=settings.load_format)
    longest, context = settings.max_model_len, source.config.max_position
    if longest is not None and longest > context:
        raise ValueError(f"the work needs {longest} tokens of context, but the model has {context}: lower {shorter}")
    device, _ = device_for(settings)
    threads = settings.cpu_threads()
    torch.set_num_threads(threads)
    library = None
    if device.type == "cpu":
        names = ("dtype", "native", "block_size", "quantization")
        choice = {name: getattr(settings, name) for name in names}
        library, _ = kernels(source.config, threads=threads, blocks=in_blocks(source), **choice)  # type: ignore[arg-type]
    packed = library is not None
    compute = "float32" if packed else str(kv_dtype(settings.dtype)).removeprefix("torch.")
    measured = device_measurement(detect(str(device)))
    rates = Rates.of(measured.ceilings, compute)
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    llm = LLM(**fields)
    dequantized = not packed and device.type == "cpu" and rounded_values(settings.quantization)
    quantization = None if dequantized else settings.quantization
    storage = storage_of(source, settings.dtype, keeps_quantized=packed, quantization=quantization)
    layout = settings.layout
    shard = first_shard(source.config, layout)
    stream = planned_stream(settings, source.config, storage, shard.shapes())
    if stream is not None:
        storage = dataclasses.replace(storage, streamed=stream.bytes)
    spread = layout if device.type == "cuda" else ALONE
    return Subject(llm, source.config, rates, storage, str(measured), spread)


def device_type(device: str) -> str:
    """Return ``cpu`` or ``cuda`` for a device option.

    Raises:
        ValueError: there is no such device.
    """
    from ..engine.config import EngineConfig
    from ..engine.device import device_for

    found: str = device_for(EngineConfig(model="any", device=device))[0].type  # type: ignore[arg-type]
    return found


def meter(wanted: bool, gpu: int) -> Callable[[], AbstractContextManager[EnergyMeter | None]]:
    """Return a function that makes an energy meter for each measured run, or one that measures nothing.

    Raises:
        ValueError: energy was asked for and cannot be measured here.
    """
    if not wanted:
        return nullcontext
    from ..bench.energy import EnergyMeter, Nvml

    source = Nvml()
    return lambda: EnergyMeter(source, [gpu])


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, WIDTH)).print(table, highlight=False)


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Return the median, the extremes, and the number of runs."""
    import statistics

    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result with its environment, if a file was requested."""
    if path is None:
        return
    from ..bench.environment import environment

    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
