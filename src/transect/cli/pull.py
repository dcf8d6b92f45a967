"""``transect pull``: fetch a model and say where it is."""

from __future__ import annotations

from .engine_options import BUILTIN, ModelArgument


def command(model: ModelArgument = BUILTIN) -> None:
    """Fetch a model into the user cache, checking it. Does nothing where it is there already."""
    from ..checkpoints.pull import BUILTIN_MODELS, pull
    from ..checkpoints.resolve import resolve

    if model in BUILTIN_MODELS:
        pull(model)  # a damaged copy is fetched again
    print(f"{model}: {resolve(model).path}")
