"""``transect pull``: fetch a model and say where it is."""

from __future__ import annotations

from .engine_options import BUILTIN, ModelArgument


def command(model: ModelArgument = BUILTIN) -> None:
    """Download a model to the cache and verify it."""
    from ..checkpoints.pull import BUILTIN_MODELS, pull
    from ..checkpoints.resolve import resolve

    if model in BUILTIN_MODELS:
        pull(model)  # a damaged copy is fetched again
    print(f"{model}: {resolve(model).path}")
