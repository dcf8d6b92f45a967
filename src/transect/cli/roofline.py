"""``transect roofline``: ceilings of a device, with the work of a model, an operator or a trace below them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .settings import output_file


def command(
    subject: Annotated[str, typer.Argument(help="A model, an operator (see `transect bench ops`), or a trace file.")],
    preset: Annotated[str | None, typer.Option(help="Another device; `transect hardware --preset list`.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Decoding sequences, for a model.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 1024,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prefill.")] = 1024,
    svg: Annotated[Path | None, output_file(help="Write a picture to this file.")] = None,
    json: Annotated[Path | None, output_file("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Draw the roofline of a model (decode and prefill, 16 and 4 bits), an operator or a trace."""
    from json import dumps

    from ..checkpoints.resolve import resolve
    from ..costs.presets import preset as find
    from ..explain.program.explain import explain_trace, machine_ceilings
    from ..explain.program.trace_file import read_trace
    from ..explain.roofline import points_of_model, points_of_operator, points_of_trace, roofline
    from ..explain.roofline_svg import svg as draw
    from ..explain.roofline_svg import text
    from ..ops import registry
    from ..spec.shapes import PRESETS as SHAPES

    made = None if preset is None else find(preset)
    ceilings = machine_ceilings() if made is None else made.ceilings()
    if subject.endswith((".json", ".json.gz", ".gz")):
        points = points_of_trace(explain_trace(read_trace(subject), ceilings).split, ceilings)
        if not points:
            raise ValueError(f"{subject} has no operators with shapes: profile with record_shapes=True")
    elif subject in {op.name for op in registry.all_ops()}:
        points = points_of_operator(subject, ceilings)
    else:
        dtype = "bfloat16" if "bfloat16" in ceilings.flops_per_second else "float32"
        config = resolve(subject, load_format="dummy" if subject in SHAPES else "auto").config
        points = points_of_model(config, ceilings, batch=batch, context=context, prompt=prompt, dtype=dtype)
    found = roofline(ceilings, points, "measured" if made is None else made.source)
    print(text(found))
    if svg is not None:
        svg.write_text(draw(found))
    if json is not None:
        json.write_text(dumps(found.to_dict(), indent=1) + "\n")
