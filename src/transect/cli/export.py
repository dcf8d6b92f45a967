"""``transect export``: a run, an adapter or a model as files that other programs read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[str, typer.Argument(help="A run, a checkpoint of one, an adapter's directory, or a model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new directory; with --gguf a file.")],
    merge: Annotated[bool, typer.Option("--merge", help="Put the adapter into the weights: a plain model.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="One GGUF file, merged, as llama.cpp runs it.")] = False,
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="--gguf: f32, bf16, f16, q8_0, q6_k, q5_k_m, q5_k, q5_1, q5_0, q4_k_m, q4_k, q4_1 or q4_0.  "
            "[default: f16]",
        ),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="An adapter for SOURCE, to be merged.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Of a merged model: auto (as its base), float32, bfloat16, float16.")
    ] = "auto",
    first_layers: Annotated[
        int | None, typer.Option(min=1, help="Leave out all later layers: a small model to draft with, or to distill.")
    ] = None,
) -> None:
    """Write an adapter in PEFT's layout, a plain model in Hugging Face layout (--merge), or a GGUF file (--gguf)."""
    from ..train.export.write import export_adapter, export_gguf, export_model, opened

    if type_ is not None and not gguf:
        raise ValueError("--type is the type of a GGUF file: give --gguf, or --dtype for a directory")
    if first_layers is not None and (gguf or adapter is not None):
        raise ValueError("--first-layers is of a plain model in Hugging Face layout: leave out --gguf and --adapter")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there already: name another output, or remove it")
    found = opened(source, adapter)
    if gguf:
        export_gguf(found, output, type_ or "f16")
        kind = f"GGUF file, {type_ or 'f16'}"
    elif found.adapter is not None and not merge and first_layers is None:
        export_adapter(found, output)
        kind = "adapter in PEFT's layout"
    else:
        export_model(found, output, dtype, first_layers=first_layers)
        kind = "model in Hugging Face layout"
    for line in found.notes:
        print(f"transect: {line}", file=sys.stderr)
    print(f"{output}: {kind}")
