"""``transect quantize``: a model in fewer bits, as files that vLLM, transformers and llama.cpp load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(help="A model, a run, or a checkpoint of one; adapters are merged.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new directory; for a GGUF type a new file.")],
    format_: Annotated[
        str, typer.Option("--format", help="fp8, int8 or int4 (compressed-tensors), or q8_0, q5_1, q5_0, q4_1, q4_0.")
    ],
) -> None:
    """Round the matrices of a model's layers and write it: safetensors (fp8, int8, int4) or GGUF (q8_0, ...)."""
    from ..models.quantize_out import FORMATS
    from ..train.export import export_gguf, export_model, opened

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there already: name another output, or remove it")
    found = opened(model)
    if format_ in FORMATS:
        export_model(found, output, quantization=format_)
    else:
        export_gguf(found, output, format_)
    size = sum(path.stat().st_size for path in ([output] if output.is_file() else output.glob("*.safetensors")))
    print(f"{output}: {format_}, {size / 1e6:.1f} MB of weights")
