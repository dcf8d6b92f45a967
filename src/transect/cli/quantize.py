"""``transect quantize``: a model in fewer bits, as files that vLLM, transformers and llama.cpp load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..spec.numbers.int4 import GROUPS
from ..spec.numbers.registry import file_uses, gguf_names, listed


def _that(ability: str) -> str:
    """List the names of the formats in safetensors with an ability."""
    return ", ".join(name for name, use in file_uses().items() if getattr(use, ability))


def command(
    model: Annotated[str, typer.Argument(help="A model, a run, or a checkpoint of one; adapters are merged.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new directory; for a GGUF type a new file.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help=f"{', '.join(file_uses())}, or a GGUF type: {', '.join(gguf_names())}.",
        ),
    ],
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Calibration text for formats of 4 to 6 bits; default: round to nearest."),
    ] = None,
    calibrate_tokens: Annotated[int, typer.Option(help="--calibrate: number of tokens to read.")] = 16384,
    group_size: Annotated[
        int | None,
        typer.Option(
            help=f"{_that('grouped')}: numbers that share a scale, {listed(map(str, GROUPS[::-1]))}; default: the most "
            "that fit."
        ),
    ] = None,
    kv_scales: Annotated[
        bool,
        typer.Option(
            "--kv-scales",
            help=f"{_that('kv_scales')}: add scales for an fp8 KV cache, one per key head; needs --calibrate.",
        ),
    ] = False,
) -> None:
    """Quantize a model's layers, and write safetensors or GGUF."""
    from ..train.export.quantize import Calibration, quantize_model
    from ..train.export.write import opened

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there already: name another output, or remove it")
    if calibrate is not None and not calibrate.is_file():
        raise ValueError(f"there is no file {calibrate}")
    calibration = None if calibrate is None else Calibration(calibrate, calibrate_tokens)
    quantize_model(opened(model), output, format_, calibration, group_size, kv_scales)
    size = sum(path.stat().st_size for path in ([output] if output.is_file() else output.glob("*.safetensors")))
    how = "" if calibrate is None else f", calibrated with {calibrate}"
    print(f"{output}: {format_}{how}, {size / 1e6:.1f} MB of weights")
